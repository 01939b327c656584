//! Records what real guests send to their disks, and crashes amberlog at every step, in simulation.
//!
//! * [`session::record`] runs a real guest over a disk that is served here and writes down every request, its data, the
//!   guest page each byte lay in, completions, and acknowledgements of durable work ([`recording`]).
//! * [`simulation`] sends a recording through the real routes, journals and area, over a simulated disk that an adversary
//!   drives, in a guest memory whose pages change between their uses as an adversary likes ([`switches`]). The module `run` takes its steps.
//! * [`kills`] looks at what it leaves when it is killed in the middle of a step.
//! * The module `follow` kills the worker and has another one go on.
//! * [`check`] compares, after every step, what amberlog would recover with what the same disk becomes with the complete
//!   journal; [`judgement`] has e2fsprogs judge a sample.
//! * [`power`] does the like for durability by age: a disk that loses power, judged by what storage alone is.
//! * [`explore`] does that for many seeds, and makes a failure small.
//!
//! What it must never do: depend on a clock or on anything else than recording and seed; write to a recorded image's
//! origin; pass over a difference that is not on its list of known ones ([`check`], [`judgement`]).
//!
//! Failure story: a broken promise is a finding, with the recording, the seed, the first crash point at which it shows,
//! the fewest liberties of the adversary that still show it, and the command that shows it again.

#![forbid(unsafe_code)]

pub mod check;
mod compare;
pub mod complete;
mod deaths;
pub mod error;
pub mod explore;
pub mod finding;
mod follow;
mod hand_over;
pub mod judgement;
pub mod kills;
pub mod nvm;
pub mod overlay;
pub mod power;
pub mod recorder;
pub mod recording;
mod run;
pub mod scenario;
mod scratch;
pub mod session;
pub mod simulation;
pub mod switches;

pub use error::{Error, Result};
