//! `guest-tools SUBCOMMAND OPTIONS`: what runs inside test guests.

#![forbid(unsafe_code)]

use guest_tools::options::Options;
use guest_tools::{
    Result, build, compile, database, filebench, gaps, iozone, load, memory, mix, namespace, nvm, postgresql, records,
    reuse, rocksdb, scribble, sources, sqlite, steady, updates,
};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let name = words.next().unwrap_or_default();
    let tool: fn(Options) -> Result<()> = match name.as_str() {
        "records" => records::run,
        "mix" => mix::run,
        "verify" => mix::verify,
        "database" => database::run,
        "append" => load::append,
        "randwrite" => load::random_write,
        "untar" => load::untar,
        "compile" => compile::run,
        "memory" => memory::run,
        "scribble" => scribble::run,
        "gaps" => gaps::run,
        "steady" => steady::run,
        "reuse" => reuse::run,
        "filebench" => filebench::run,
        "updates" => updates::run,
        "iozone" => iozone::run,
        "sqlite" => sqlite::run,
        "postgresql" => postgresql::run,
        "rocksdb" => rocksdb::run,
        "sources" => sources::run,
        "build" => build::run,
        "namespace" => namespace::run,
        "nvm" => nvm::run,
        _ => {
            eprintln!(
                "guest-tools: '{name}' is not one of records, mix, verify, database, append, randwrite, untar, compile, scribble, \
                 filebench, updates, iozone, sqlite, postgresql, rocksdb, sources, build, namespace, nvm, gaps, steady, reuse, memory"
            );
            return ExitCode::from(2);
        }
    };
    match Options::parse(words).and_then(tool) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest-tools {name}: {error}");
            ExitCode::FAILURE
        }
    }
}
