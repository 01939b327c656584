//! A device process killed with requests in the kernel, again and again; the front-end lives on.

mod common;

use block_device::{CacheMode, Device, DeviceConfig};
use block_route::PlainRoute;
use common::{MIB, Place, open, pattern};
use guest_memory::VmMemory;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, STATUS_OK, TestDisk, Transfer};

const SOCKET: &str = "BLOCK_DEVICE_TEST_SOCKET";
const IMAGE: &str = "BLOCK_DEVICE_TEST_IMAGE";

/// Not a test of its own: what the child process does.
#[test]
fn serve_until_killed() {
    let (Some(socket), Some(image)) = (std::env::var_os(SOCKET), std::env::var_os(IMAGE)) else { return };
    let config = DeviceConfig::new("victim", PathBuf::from(socket), open(&PathBuf::from(image), CacheMode::Auto));
    let _device = Device::start(config, Box::new(PlainRoute), VmMemory::new(), Arc::new(())).unwrap();
    loop {
        std::thread::park();
    }
}

struct Victim(Child);

impl Victim {
    fn start(place: &Place) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_until_killed", "--nocapture"])
            .env(SOCKET, place.socket())
            .env(IMAGE, place.image())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Victim(child)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn nothing_is_lost_when_the_device_is_killed() {
    let place = Place::new(64 * MIB);
    let mut victim = Victim::start(&place);
    let options = FrontEndOptions { queues: 2, ..FrontEndOptions::default() };
    let mut front_end = FrontEnd::connect(&place.socket(), GuestRam::new(64 * MIB).unwrap(), options).unwrap();
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    let data = disk.front_end.ram.take(2 * 32 * 4096, 4096);
    let mut cut_short = 0;
    for round in 0..15u64 {
        for queue in 0..2 {
            for slot in 0..32 {
                let at = queue as u64 * 32 + slot;
                let (address, place) = (data + at * 4096, round * 64 + at);
                disk.front_end.ram.write(address, &pattern(place * 4096, 4096, round));
                disk.submit(queue, place * 8, &Transfer::Write(vec![(address, 4096)])).unwrap();
            }
            disk.kick(queue).unwrap();
        }
        // At once, or after a while that differs from round to round.
        for _ in 0..round * 3000 {
            std::hint::spin_loop();
        }
        drop(victim);
        let answered = disk.answers(0).unwrap().len() + disk.answers(1).unwrap().len();
        cut_short += u64::from(answered < 64);
        victim = Victim::start(&place);
        disk.front_end.reconnect().unwrap();
        let rest = [disk.wait_all(0).unwrap(), disk.wait_all(1).unwrap()].concat();
        assert_eq!(answered + rest.len(), 64, "round {round}");
        assert!(rest.iter().all(|answer| answer.status == STATUS_OK));
        let (status, bytes) = disk.read(round * 64 * 4096, 64 * 4096).unwrap();
        assert_eq!(status, STATUS_OK);
        assert!(bytes == pattern(round * 64 * 4096, 64 * 4096, round), "round {round}");
    }
    assert!(cut_short > 0, "no death came with requests in flight");
    drop(victim);
}

/// Whoever goes on with the image of a device that was killed writes over what that one had under way, and what it writes stays.
#[test]
fn nothing_of_a_killed_device_comes_after_its_image_is_idle() {
    const WRITES: u64 = 40;
    const BYTES: usize = 128 << 10;
    let place = Place::new(WRITES * BYTES as u64);
    assert!(open(&place.image(), CacheMode::Auto).tells_its_end(), "this file system has no locks of open files");
    // Past the cache, as the device does it.
    let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(place.image()).unwrap();
    let mut memory = vec![0; BYTES + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let bytes = &mut memory[skip..skip + BYTES];
    let mut cut_short = 0;
    for round in 0..12u64 {
        let victim = Victim::start(&place);
        let options = FrontEndOptions { queues: 1, ..FrontEndOptions::default() };
        let mut front_end = FrontEnd::connect(&place.socket(), GuestRam::new(16 * MIB).unwrap(), options).unwrap();
        front_end.start().unwrap();
        let mut disk = TestDisk::new(front_end);
        let data = disk.front_end.ram.take(BYTES as u64, 4096);
        disk.front_end.ram.write(data, &vec![7; BYTES]);
        for write in 0..WRITES {
            disk.submit(0, write * BYTES as u64 / 512, &Transfer::Write(vec![(data, BYTES as u32)])).unwrap();
        }
        disk.kick(0).unwrap();
        for _ in 0..round * 20_000 {
            std::hint::spin_loop();
        }
        drop(victim);
        block_device::await_idle(&file).unwrap();
        cut_short += u64::from(disk.answers(0).unwrap().len() < WRITES as usize);
        bytes.fill(9);
        for write in 0..WRITES {
            file.write_all_at(bytes, write * BYTES as u64).unwrap();
        }
        std::thread::sleep(Duration::from_millis(40));
        for write in 0..WRITES {
            file.read_exact_at(bytes, write * BYTES as u64).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 9), "round {round}: write {write} landed later");
        }
    }
    assert!(cut_short > 0, "no death came with requests in flight");
}
