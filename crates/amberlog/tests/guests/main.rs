//! Real guests below `amberlog run`: each test boots an unmodified Debian kernel under unmodified QEMU, lets something
//! happen to it, and judges the image that is left with e2fsck and by the work that the guest was told is durable.
//!
//! `AMBERLOG_ROUNDS` makes the loops longer, `AMBERLOG_SEED` changes their choices.

mod arguments;
mod awake;
mod backup;
mod clean;
mod cloud_hypervisor;
mod copied;
mod daemon;
mod dax;
mod detach;
mod disks;
mod durable;
mod durable_live;
mod durable_power;
mod fast_commit;
mod hotplug;
mod journals;
#[path = "../common/judges.rs"]
mod judges;
mod kill;
mod leaving;
mod libvirt;
mod limits;
mod log_writes;
mod memory;
mod metrics;
mod migration;
mod nats;
mod nvm;
mod nvm_pipelined;
mod placements;
mod plugged;
mod power;
mod power_button;
mod refusals;
mod remote;
mod remount;
mod reset;
mod sandbox;
mod serve;
mod shared;
mod stacked;
mod supervisor;
mod support;
mod suspend;
mod systemd;
mod together;
mod tuned;
mod wild;
mod worker;
