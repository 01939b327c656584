#![no_main]
//! Journal parsing, planning, replay, inspection and materialising.

#[path = "../src/journal.rs"]
mod journal;

libfuzzer_sys::fuzz_target!(|data: &[u8]| journal::run(data));
