//! Commands beside the lab's own: traces, simulated SSDs, modelled disks.

pub mod disk_model;
pub mod progress;
pub mod ssd;
pub mod trace;
