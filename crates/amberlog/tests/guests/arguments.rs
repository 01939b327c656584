//! QEMU's arguments beside amberlog's: what is refused with a sentence, which memory QEMU really has then, and which disk is
//! /dev/vda.

use crate::support::*;
use guest_kit::image::{ExtRecipe, create_sparse};
use guest_kit::{AtEnd, Guest};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A QEMU below amberlog that never runs its guest, and is asked things.
struct Stopped {
    process: Child,
    reader: BufReader<UnixStream>,
}

impl Stopped {
    fn start(bench: &Bench, words: impl IntoIterator<Item = OsString>, arguments: &[&str]) -> Self {
        let socket = bench.path("qmp");
        let _ = std::fs::remove_file(&socket);
        let mut all = bench.words(words);
        all.extend(
            ["--", "qemu-system-x86_64", "-S", "-nodefaults", "-display", "none", "-accel", "tcg"].map(Into::into),
        );
        all.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", socket.display()).into()]);
        all.extend(arguments.iter().map(OsString::from));
        let log = std::fs::File::create(bench.path("stderr")).unwrap();
        let mut process = Command::new(&all[0]).args(&all[1..]).stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(_) if process.try_wait().unwrap().is_none() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    let _ = process.kill();
                    panic!("{arguments:?}: {error}: {}", std::fs::read_to_string(bench.path("stderr")).unwrap())
                }
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut stopped = Self { process, reader: BufReader::new(stream) };
        stopped.line();
        stopped.ask("qmp_capabilities", json!({}));
        stopped
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        // At once: QEMU takes a command without its line's end, and is gone after "quit" before that would be written.
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.reader.get_mut().write_all(line.as_bytes()).unwrap();
        loop {
            let mut answer = self.line();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(value) = answer.get_mut("return") {
                return value.take();
            }
        }
    }

    /// The object that is the guest's memory; nothing with NUMA nodes.
    fn memory(&mut self) -> String {
        let answer = self.ask("qom-get", json!({"path": "/machine", "property": "memory-backend"}));
        answer.as_str().unwrap_or_default().trim_start_matches("/objects/").to_owned()
    }

    /// The memory backends: id, bytes, shared, allocated at once.
    fn backends(&mut self) -> Vec<(String, u64, bool, bool)> {
        let answer = self.ask("query-memdev", json!({}));
        let mut all: Vec<_> = answer
            .as_array()
            .unwrap()
            .iter()
            .map(|one| {
                let flag = |name: &str| one[name].as_bool().unwrap();
                (one["id"].as_str().unwrap().to_owned(), one["size"].as_u64().unwrap(), flag("share"), flag("prealloc"))
            })
            .collect();
        all.sort();
        all
    }

    fn end(mut self) {
        self.ask("quit", json!({}));
        assert_eq!(self.process.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// QEMU is asked which memory it has: the one that amberlog thinks it has, with whatever the user said of it.
#[test]
fn the_memory_is_what_amberlog_believes_it_to_be() {
    let bench = Bench::new();
    let image = bench.path("image");
    ExtRecipe::ext4(16, 4).make(&image).unwrap();
    let nvdimm =
        format!("memory-backend-file,id=n,share=on,size=16M,mem-path={}", bench.area().join("nvdimm").display());
    let of_file = format!(
        r#"{{"qom-type":"memory-backend-file","id":"m","share":true,"size":67108864,"mem-path":"{}"}}"#,
        bench.area().join("a,b").display()
    );
    let of_file_text =
        format!("memory-backend-file,size=64M,id=m,mem-path={},share", bench.area().join("a,,b").display());
    const MIB: u64 = 1 << 20;
    let ours = |size: u64| vec![("amberlog-memory", size, true, false)];
    let theirs = |prealloc: bool| vec![("m", 64 * MIB, true, prealloc)];
    type Backends<'a> = Vec<(&'a str, u64, bool, bool)>;
    let cases: Vec<(Vec<&str>, &str, Backends)> = vec![
            (vec!["-M", "q35", "-m", "64"], "amberlog-memory", ours(64 * MIB)),
            (vec!["-M", "pc", "--m", "size=0.0625G"], "amberlog-memory", ours(64 * MIB)),
            (vec!["-M", "microvm", "-m", "64M"], "amberlog-memory", ours(64 * MIB)),
            (vec!["-M", "microvm,pcie=on", "-m", "64M"], "amberlog-memory", ours(64 * MIB)),
            (
                vec!["-M", "pc", "-machine", "q35", "-m", "64", "-m", "slots=2,maxmem=1G"],
                "amberlog-memory",
                ours(64 * MIB),
            ),
            (vec!["-M", "q35", "-m", "67000000B"], "amberlog-memory", ours(67_002_368)),
            (
                vec!["-M", "q35", "-m", "64", "-mem-prealloc"],
                "amberlog-memory",
                vec![("amberlog-memory", 64 * MIB, true, true)],
            ),
            (
                vec![
                    "-M",
                    "q35,memory-backend=m",
                    "-m",
                    "64",
                    "-object",
                    "memory-backend-memfd,id=m,size=64M,share,prealloc=on",
                ],
                "m",
                theirs(true),
            ),
            (vec!["-M", "q35", "-machine", "memory-backend=m", "-m", "64", "-object", &of_file], "m", theirs(false)),
            (
                vec!["-M", "q35", "-machine", "memory-backend=m", "-m", "64", "-object", &of_file_text],
                "m",
                theirs(false),
            ),
            (
                [
                    &[
                        "-M",
                        "q35",
                        "-m",
                        "64",
                        "-object",
                        "memory-backend-memfd,id=a,size=32M",
                        "-numa",
                        "node,memdev=a",
                    ][..],
                    &[
                        "-object",
                        r#"{"qom-type":"memory-backend-memfd","id":"b","size":33554432}"#,
                        "-numa",
                        "node,memdev=b",
                    ],
                ]
                .concat(),
                "",
                vec![("a", 32 * MIB, true, false), ("b", 32 * MIB, true, false)],
            ),
            (
                vec![
                    "-M",
                    "q35,nvdimm=on",
                    "-m",
                    "64,slots=2,maxmem=1G",
                    "-object",
                    &nvdimm,
                    "-device",
                    "nvdimm,memdev=n",
                ],
                "amberlog-memory",
                vec![("amberlog-memory", 64 * MIB, true, false), ("n", 16 * MIB, true, false)],
            ),
        ];
    for (arguments, memory, backends) in cases {
        let mut vmm = Stopped::start(&bench, disk(&image), &arguments);
        if !memory.is_empty() {
            assert_eq!(vmm.memory(), memory, "{arguments:?}");
        }
        let found = vmm.backends();
        let found: Vec<_> =
            found.iter().map(|(id, size, share, at_once)| (id.as_str(), *size, *share, *at_once)).collect();
        assert_eq!(found, backends, "{arguments:?}");
        vmm.end();
    }
}

/// What contradicts the promise is said before anything is started, and nothing is left.
#[test]
fn contradictions_are_sentences() {
    let bench = Bench::new();
    let image = bench.path("image");
    ExtRecipe::ext4(16, 4).make(&image).unwrap();
    let before = std::fs::read(&image).unwrap();
    let drive = format!("if=virtio,format=raw,file={},snapshot=on", image.display());
    let config = bench.path("vm.cfg");
    std::fs::write(&config, "[machine]\n  type = \"q35\"\n").unwrap();
    for (arguments, word) in [
        (&["-snapshot"][..], "-snapshot has no effect"),
        (&["-incoming", "defer"], "-incoming"),
        (&["-loadvm", "before"], "-loadvm"),
        (&["-drive", &drive], "twice"),
        (&["-hda", image.to_str().unwrap()], "twice"),
        (&["-readconfig", config.to_str().unwrap()], "-readconfig"),
        (&["-mem-path", "/dev/shm"], "-mem-path"),
        (&["-numa", "node"], "each -numa node"),
        (&["-M", "isapc"], "no bus for virtio disks"),
        (
            &["-object", r#"{"qom-type":"memory-backend-ram","id":"m","size":134217728}"#, "-M", "memory-backend=m"],
            "memfd",
        ),
        (&["-object", r#"{"qom-type":"memory-backend-file","id":"m","share":false}"#], "share=on"),
        (&["-m", "much"], "no size of memory"),
        (&["-daemonize"], "-daemonize"),
    ] {
        let mut words = bench.words(disk(&image));
        words.extend(["--", "qemu-system-x86_64", "-display", "none"].map(Into::into));
        words.extend(arguments.iter().map(OsString::from));
        let output = Command::new(&words[0]).args(&words[1..]).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(word) && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
        bench.assert_area_is_empty();
    }
    let output = amberlog_with(["run", "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--disk"), "{}", text(&output.stderr));
    assert!(std::fs::read(&image).unwrap() == before);
}

/// With a virtio disk of QEMU's own given before and another after, amberlog's are still /dev/vda and /dev/vdb.
#[test]
fn amberlogs_disks_are_the_first() {
    for machine in ["q35", "pc"] {
        let bench = Bench::new();
        let [one, two, own, other] = ["one", "two", "own", "other"].map(|name| bench.path(name));
        ExtRecipe::ext4(24, 4).make(&one).unwrap();
        ExtRecipe::ext4(32, 4).make(&two).unwrap();
        let sparse = |path: &Path, mib: u64| create_sparse(path, mib << 20).unwrap();
        sparse(&own, 5);
        sparse(&other, 6);
        let script = "
            sizes=
            for disk in vda vdb vdc vdd; do sizes=\"$sizes $(($(cat /sys/block/$disk/size) / 2048))\"; done
            [ \"$sizes\" = ' 24 32 6 5' ] || fail \"the disks have$sizes MiB\"
            [ \"$(cat /sys/block/vda/serial) $(cat /sys/block/vdb/serial)\" = 'first disk1' ] || fail serials
            mount -t ext4 -o data=journal /dev/vdb /mnt || fail mount
            echo hello >/mnt/file; umount /mnt";
        let words = [disk_with(&one, ",name=first"), disk(&two)].concat();
        let mut spec = bench.spec(machine, script, words);
        spec.at_end = AtEnd::PowerOff;
        let drive = |name: &str, path: &Path| format!("if={name},format=raw,file={}", path.display());
        spec.qemu_arguments =
            ["-machine", machine, "-drive", &drive("virtio", &own), "-drive"].map(Into::into).to_vec();
        spec.qemu_arguments.push(format!("{},id=other", drive("none", &other)).into());
        spec.qemu_arguments.extend(["-device", "virtio-blk-pci,drive=other"].map(Into::into));
        let mut guest = Guest::start(spec).unwrap();
        assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0, "{machine}: {}", guest.console());
        let status = guest.wait_end(LIMIT).unwrap();
        assert_ends_with(&guest, status, 0);
        bench.assert_area_is_empty();
    }
}
