#![no_main]
//! Partition tables, ext superblocks, groups and journal maps.

#[path = "../src/ext.rs"]
mod ext;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ext::run(data);
});
