//! One image for several VMs, which only read it: a base system, a toolchain. It is owed nothing, so that none of them stands
//! in another's way, alive or killed.

use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::ExtRecipe;
use std::process::Command;

const SCRIPT: &str = "
    mount -t ext4 -o ro /dev/vdb /mnt || fail 'the shared disk cannot be mounted'
    [ \"$(cat /mnt/greeting)\" = hello ] || fail 'the shared disk has something else'
    mkdir /tmp/own
    mount -t ext4 -o data=journal /dev/vda /tmp/own || fail 'the own disk cannot be mounted'
    echo mine >/tmp/own/file && sync
    mark ready";

#[test]
fn several_vms_read_one_image() {
    let shared_by = Bench::new();
    let shared = shared_by.path("shared");
    let content = shared_by.path("content");
    std::fs::create_dir(&content).unwrap();
    std::fs::write(content.join("greeting"), "hello").unwrap();
    ExtRecipe { content: Some(content), ..ExtRecipe::ext4(16, 4) }.make(&shared).unwrap();
    let before = std::fs::read(&shared).unwrap();

    let start = |bench: &Bench, name: &str| {
        let own = bench.path("own");
        let file_system = ExtRecipe::ext4(32, 4).make(&own).unwrap();
        (
            Guest::start(bench.spec(name, SCRIPT, [disk(&own), disk_with(&shared, ",readonly")].concat())).unwrap(),
            file_system,
        )
    };
    let benches = [Bench::new(), Bench::new(), Bench::new()];
    let (mut first, first_disk) = start(&benches[0], "first");
    let (mut second, second_disk) = start(&benches[1], "second");
    for guest in [&mut first, &mut second] {
        guest.wait_mark("ready", LIMIT).unwrap();
    }
    // Whoever wants to write it has to wait until nobody reads it.
    let mut words = shared_by.words(disk(&shared));
    words.extend(["--".into(), "true".into()]);
    let output = Command::new(&words[0]).args(&words[1..]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("in use"), "{}", text(&output.stderr));

    kill(&mut first);
    let (mut third, third_disk) = start(&benches[2], "third");
    third.wait_mark("ready", LIMIT).unwrap();
    for guest in [&mut second, &mut third] {
        kill(guest);
    }
    for file_system in [&first_disk, &second_disk, &third_disk] {
        assert_consistent(file_system);
        assert_eq!(guest_kit::judge::read_file(file_system, "/file").unwrap().unwrap(), b"mine\n");
    }
    assert!(std::fs::read(&shared).unwrap() == before, "the shared image was changed");
    benches.iter().for_each(Bench::assert_area_is_empty);
}
