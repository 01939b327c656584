#![no_main]
//! Rings, descriptor chains and the requests in them.

#[path = "../src/chain.rs"]
mod chain;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    chain::run(data);
});
