#![no_main]

#[path = "../src/wire.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| wire::run(data));
