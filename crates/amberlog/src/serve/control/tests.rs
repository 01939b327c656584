//! Questions as somebody could send them who has got as far as the socket.

use super::super::supervised::Wish;
use super::*;
use crate::supervisor::Charge;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

#[path = "../../../../../fuzz/src/exercise.rs"]
mod exercise;

const TARGET: &str = "control";

/// Of the tests that ask for what may take hours, one at a time: the places for that are the program's.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a daemon without VMs answers to these bytes.
fn asked(bytes: &[u8]) -> anyhow::Result<Value> {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    // No more than the socket takes: nobody reads while it is written.
    let bytes = &bytes[..bytes.len().min(100_000)];
    (&theirs).write_all(bytes).expect("room");
    theirs.shutdown(std::net::Shutdown::Write).expect("shut");
    answer(&ours, &Slots::default(), &HostMemory::default(), Path::new("/nonexistent"))
}

/// `detach` ends a daemon by a signal.
fn survive_detach() -> Arc<AtomicBool> {
    let came = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGUSR2, Arc::clone(&came)).expect("registered");
    came
}

#[test]
fn whatever_is_asked_is_answered_and_nothing_else_happens() {
    let _alone = alone();
    let _came = survive_detach();
    exercise::exercise(TARGET, 4000, &|data| {
        if let Ok(answer) = asked(data) {
            assert_eq!(answer["schema"], 1, "{answer}");
        }
    });
}

#[test]
fn a_question_is_understood_or_a_sentence_comes_back() {
    let _alone = alone();
    let came = survive_detach();
    assert_eq!(asked(b"{\"command\":\"status\",\"vm\":null}\n").expect("an answer")["vms"], json!([]));
    assert!(asked(b"{\"command\":\"detach\",\"patience_seconds\":1}\n").is_ok() && came.load(Ordering::SeqCst));
    // Deeper than any parser's stack, longer than a question may be, no text at all, one question too many fields.
    let deep = [b"[".repeat(60_000), b"\n".to_vec()].concat();
    let long = [b"{\"command\":\"status\",\"vm\":\"".to_vec(), b"x".repeat(90_000), b"\"}\n".to_vec()].concat();
    for bad in [&b""[..], b"\xff\xfe\n", &deep, &long, b"{\"command\":\"status\",\"vm\":null,\"x\":1}\n"] {
        let error = asked(bad).expect_err("no question").to_string();
        assert!(error.contains("question"), "{error}");
    }
    let error = asked(b"{\"command\":\"flush\",\"vm\":\"../x\",\"patience_seconds\":18446744073709551615}\n")
        .expect_err("no vm");
    assert!(error.to_string().contains("there is no vm ../x"), "{error}");
}

/// Who wishes for an age may wait for hours, and leaves places for who has to be heard.
#[test]
fn who_waits_for_an_age_has_one_of_the_places_for_hours() {
    let _alone = alone();
    let ask = |within: Value| {
        let question = json!({"command": "placement", "vm": "db", "disk": "disk0", "placement": "retain",
            "durable_within": within, "patience_seconds": 86_400});
        asked(format!("{question}\n").as_bytes()).expect_err("there is no such vm").to_string()
    };
    assert!(ask(json!("5")).contains("there is no vm db"), "{}", ask(json!("5")));
    let long: Vec<Long> = (0..LONG_MAX).map(|_| Long::begin().expect("a place")).collect();
    let said = ask(json!("5"));
    assert!(said.contains("24 others wait for a snapshot, a flush or durable-within"), "{said}");
    assert!(ask(Value::Null).contains("there is no vm db"), "its journal moves");
    drop(long);
    assert!(ask(json!("5")).contains("there is no vm db"));
}

/// The thread of one VM is busy, and somebody asks how that one is: who asks for another one is answered.
#[test]
fn a_busy_vm_keeps_nobody_from_another_one() {
    let slots = Slots::default();
    for name in ["busy", "idle"] {
        let slot = Supervised::new(name, Wish::Gone, true, Charge::default());
        slots.lock().expect("no panic under this lock").insert(name.to_owned(), slot);
    }
    let busy = find(&slots, "busy").expect("there");
    let askers = busy.while_it_is_busy(|| {
        let began = Arc::new(Barrier::new(3));
        let (of_one, of_all) = [&slots, &slots].map(|slots| (Arc::clone(slots), Arc::clone(&began))).into();
        let one = std::thread::spawn(move || {
            of_one.1.wait();
            find(&of_one.0, "busy").is_ok()
        });
        let all = std::thread::spawn(move || {
            of_all.1.wait();
            living(&of_all.0).len() == 2
        });
        began.wait();
        // Until they wait for the busy one.
        std::thread::sleep(Duration::from_millis(100));
        let (answer, answered) = channel();
        let slots = Arc::clone(&slots);
        std::thread::spawn(move || answer.send(find(&slots, "idle").is_ok()));
        assert!(answered.recv_timeout(Duration::from_secs(20)).expect("an answer"));
        [one, all]
    });
    for asker in askers {
        assert!(asker.join().expect("no panic"));
    }
}

#[test]
fn a_configuration_is_looked_at_with_the_daemons_eyes() {
    let check = |configuration: &str| {
        asked(format!("{}\n", json!({"command": "check", "configuration": configuration})).as_bytes())
    };
    let answer = check("[[vm]]\nname = \"db\"\ndisks = [\"/nonexistent/a.img\"]\n").expect("an answer");
    let found: Found = serde_json::from_value(answer["found"].clone()).expect("what was found");
    let is_said =
        |problem: &crate::serve::check::Problem| problem.sentence.contains("/nonexistent/a.img does not exist");
    assert!(found.problems.iter().any(is_said), "{answer}");
    let error = check("[[vm]]\n").expect_err("it is no configuration").to_string();
    assert!(error.contains("does not take"), "{error}");
}

/// One VM that is refused keeps no other one from being upgraded; a program that does not serve is not tried on all of them.
#[test]
fn each_vm_is_upgraded_that_can_be() {
    let outcomes = |fails: fn(&str) -> anyhow::Result<()>| {
        let of = ["a", "b", "c"].map(|name| (name.to_owned(), name));
        let entries = upgrade_each(of, "9", |name| fails(name));
        let outcome = |entry: &Value| match (entry["version"].as_str(), entry["error"].as_str()) {
            (Some("9"), None) => "done".to_owned(),
            (None, Some(error)) => error.to_owned(),
            _ => panic!("{entry}"),
        };
        entries.iter().map(outcome).collect::<Vec<_>>()
    };
    assert_eq!(outcomes(|name| if name == "a" { anyhow::bail!("no") } else { Ok(()) }), ["no", "done", "done"]);
    let told = outcomes(|name| if name == "b" { Err(DoesNotServe("bad".to_owned()).into()) } else { Ok(()) });
    assert_eq!(told[..2], ["done", "bad"]);
    assert!(told[2].contains("vm c: nothing was changed") && told[2].contains("vm b"), "{told:?}");
}

/// Makes the first inputs anew (scripts/fuzz.sh seeds).
#[test]
#[ignore = "writes into the source tree"]
fn seeds() {
    let questions = [
        ("status", json!({"command": "status", "vm": null})),
        ("status-vm", json!({"command": "status", "vm": "db"})),
        ("flush", json!({"command": "flush", "vm": "db", "patience_seconds": 60})),
        (
            "placement",
            json!({"command": "placement", "vm": "db", "disk": "disk0", "placement": "storage", "patience_seconds": 30}),
        ),
        ("arguments", json!({"command": "arguments", "vm": "db", "memory_mib": 1024, "reconnect": true})),
        ("detach", json!({"command": "detach", "patience_seconds": 60})),
    ];
    exercise::write_seeds(
        TARGET,
        questions.into_iter().map(|(name, question)| (name, format!("{question}\n").into_bytes())).collect(),
    );
    assert!(!exercise::corpus(TARGET).is_empty());
}
