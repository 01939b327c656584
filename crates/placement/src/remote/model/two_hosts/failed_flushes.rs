//! A flush of the same disk, another log's or the guest's, fails while something of a log is written there and not flushed yet. The kernel
//! tells that one alone that a write is lost: nothing that this log has written ends well then.

use super::*;
use crate::remote::MirrorFile;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    FallBack,
    Settle,
    Close,
    Open,
    MoveTail,
    Distrust,
    Return,
    Recover,
}

const ALL: [What; 8] = [
    What::FallBack,
    What::Settle,
    What::Close,
    What::Open,
    What::MoveTail,
    What::Distrust,
    What::Return,
    What::Recover,
];

/// A host does this. After one of its steps, if that is a write, another flush fails. Gives what it did, and whether that has failed.
fn another_fails_after(what: What, step: Option<usize>) -> (Vec<Step>, bool) {
    let mut cluster = Cluster::new();
    cluster.what = format!("{what:?}, step {step:?}");
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
    if what == What::Return {
        cluster.cut(0);
        cluster.wait_for(0, |mode| mode == Mode::Storage);
        assert!(cluster.commit(0));
    }
    if what == What::Recover {
        cluster.kill(0);
    }
    if matches!(what, What::Open | What::Close) {
        assert!(cluster.pass(0));
    }
    let mut running = cluster.hosts[0].running.take();
    let open = running.as_ref().map_or_else(Vec::new, |running| {
        Cluster::superblock_of(&running.superblock, (running.builder.position, running.builder.sequence))
    });
    let closed = running
        .as_ref()
        .map_or_else(Vec::new, |running| Cluster::superblock_of(&running.superblock, (0, running.builder.sequence)));
    if let (What::Open, Some(running)) = (what, running.as_mut()) {
        running.log.close(&closed).expect("closed");
        running.log.stop_as_killed();
        running.log = cluster.attach(0, &open_disk(&cluster.path));
        // What its thread writes on its way to the server is not what this asks for.
        cluster.cut(0);
    }
    let connects = running.as_ref().map_or(0, |running| running.log.report().connects);
    cluster.hosts[0].running = running;
    let host = usize::from(what == What::Recover);
    let gate = Arc::clone(&cluster.hosts[host].gate);
    {
        let mut state = gate.lock();
        state.steps.clear();
        (state.loses, state.has_lost) = (step, false);
    }
    let superblock = |block: &[u8]| Superblock::decode(block).expect("a superblock");
    let with = |cluster: &Cluster, ask: &dyn Fn(&RemoteLog) -> io::Result<()>| {
        ask(&cluster.hosts[0].running.as_ref().expect("it runs").log).is_ok()
    };
    let is_well = match what {
        What::FallBack => {
            cluster.cut(0);
            let waiting = cluster.begin_commit(0);
            waiting.is_some_and(|waiting| cluster.end_commit(0, waiting))
        }
        What::Return => {
            cluster.mend(0);
            cluster.wait_for(0, |mode| mode == Mode::Remote);
            // It would have begun once more.
            let now = cluster.hosts[0].running.as_ref().map_or(0, |running| running.log.report().connects);
            now == connects + 1
        }
        What::Settle => with(&cluster, &RemoteLog::settle),
        What::Close => with(&cluster, &|log| log.close(&closed)),
        What::Open => with(&cluster, &|log| log.open(&superblock(&open), &open)),
        What::MoveTail => with(&cluster, &|log| log.superblock(&superblock(&open), &open)),
        What::Distrust => with(&cluster, &RemoteLog::say_distrusted),
        What::Recover => cluster.recover(host).is_ok(),
    };
    let (steps, has_lost) = {
        let mut state = gate.lock();
        state.loses = None;
        (state.steps.clone(), state.has_lost)
    };
    assert!(is_well || has_lost, "{}: nothing has failed", cluster.what);
    assert!(!is_well || !has_lost, "{}: it ends well, and may be lost", cluster.what);
    if what == What::Close && !is_well {
        // It is open as before, and what it commits counts.
        assert!(cluster.commit(0), "{}: the log is not open any more", cluster.what);
    }
    // Nobody here replays what is not trusted.
    if what != What::Distrust {
        cluster.judge();
    }
    (steps, has_lost)
}

#[test]
fn nothing_ends_well_over_what_another_flush_may_have_lost() {
    for what in ALL {
        let (steps, _) = another_fails_after(what, None);
        let writes = steps.iter().enumerate().filter(|(_, step)| **step == Step::Write).map(|(number, _)| number);
        let has_lost = writes.filter(|step| another_fails_after(what, Some(*step)).1).count();
        println!("{what:?}: {} steps, {has_lost} writes that may be lost", steps.len());
        assert!(has_lost > 0, "{what:?} writes nothing in {} steps", steps.len());
    }
}

/// What an earlier process wrote to storage counts when it is durable, and whoever was told that it is not has been told in place of the log.
#[test]
fn a_log_is_not_gone_on_with_over_what_another_flush_may_have_lost() {
    for has_failed in [false, true] {
        let cluster = Cluster::new();
        let (place, copy) = (&cluster.place, cluster.path.with_file_name("copy"));
        let file = || std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&copy);
        let file = || file().expect("a file");
        let (options, disks) = (cluster.options(0), || [open_disk(&cluster.path), open_disk(&cluster.path)]);
        let mirror = Arc::new(MirrorFile::make(file(), place).expect("made"));
        let (medium, back_off) = (cluster.medium(0), BackOff::default());
        let log = RemoteLog::on_medium(&options, place.clone(), disks(), medium, back_off, Some(mirror));
        let log = log.expect("a thread");
        let block = Cluster::superblock_of(&cluster.superblock(), (1, 1));
        log.open(&Superblock::decode(&block).expect("a superblock"), &block).expect("opened");
        log.stop_as_killed();
        let mirror = Arc::new(MirrorFile::take_up(file(), place).expect("it says something"));
        let medium = cluster.medium(0);
        let next = RemoteLog::take_up_on_medium(&options, place.clone(), disks(), medium, back_off, mirror);
        let next = next.expect("a thread");
        if has_failed {
            cluster.disk.note_failed_flush();
        }
        assert_eq!(next.go_on().is_err(), has_failed);
    }
}
