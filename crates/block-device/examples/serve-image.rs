//! Serves one raw image over vhost-user-blk with no journal of ours: the plain data path, for benchmarks and trials.
//!
//! `serve-image SOCKET IMAGE [direct|buffered] [readonly]`; ends when its standard input does.

use block_device::{CacheMode, Device, DeviceConfig, Image, ImageOptions};
use block_route::PlainRoute;
use guest_memory::VmMemory;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, image, flags @ ..] = &arguments[..] else {
        eprintln!("usage: serve-image SOCKET IMAGE [direct|buffered] [readonly]");
        return ExitCode::from(2);
    };
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    let cache = match (has("direct"), has("buffered")) {
        (true, _) => CacheMode::Direct,
        (_, true) => CacheMode::Buffered,
        _ => CacheMode::Auto,
    };
    let options = ImageOptions { read_only: has("readonly"), cache, is_raw: false, keep_time: false };
    let started = Image::open(Path::new(image), options).and_then(|image| {
        let config = DeviceConfig::new("vda", socket, Arc::new(image));
        Device::start(config, Box::new(PlainRoute), VmMemory::new(), Arc::new(()))
    });
    let device = match started {
        Ok(device) => device,
        Err(error) => {
            eprintln!("serve-image: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("ready");
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).is_ok_and(|count| count > 0) {}
    let counters = device.handle().counters();
    match device.stop() {
        Ok(_) => {
            eprintln!("{counters:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("serve-image: {error}");
            ExitCode::FAILURE
        }
    }
}
