//! The lab as a whole: its loads and quick runs in real guests, a small shoot-out, its page in a real browser, its commands. They wait more than
//! they compute, each for its own guests: as one program they wait side by side. They begin in the order of their names, and what takes longest
//! (`contenders`) is among the first.

mod build;
mod contenders;
mod loads;
mod modelled;
mod page;
mod quick;
mod ssd_command;
