//! What the adversary may do. A failure is minimised by taking these away one by one.

/// The adversary's liberties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches(u32);

impl Switches {
    /// Pages get their next content at any moment after their last use, not just before their next.
    pub const EARLY: Switches = Switches(1);
    /// Pages that are not in use get any content for a while.
    pub const GARBAGE: Switches = Switches(2);
    /// The disk takes its time, and does things in any order.
    pub const DELAY: Switches = Switches(4);
    /// Requests come in other passes than they were recorded in.
    pub const PASSES: Switches = Switches(8);
    /// Memory for copies is short.
    pub const PRESSURE: Switches = Switches(16);
    /// Placement `copy` instead of `retain`.
    pub const COPY: Switches = Switches(32);
    /// amberlog is killed between two stores into its files.
    pub const KILLS: Switches = Switches(64);

    /// Logs are handed over to storage from some moment on, or leave their region.
    pub const HAND_OVER: Switches = Switches(128);

    /// The worker is killed between two steps, or between two stores of one, and another goes on with what is left.
    pub const FOLLOW: Switches = Switches(256);

    /// A region's transactions are acknowledged before the flush of their appends.
    pub const PIPELINED: Switches = Switches(512);

    /// With `HAND_OVER`: the guest is reset as its held logs are to be handed over, and the run ends with that. No seed asks for it by itself.
    pub const RESET: Switches = Switches(1024);

    const NAMES: [(Switches, &'static str); 11] = [
        (Self::EARLY, "early"),
        (Self::GARBAGE, "garbage"),
        (Self::DELAY, "delay"),
        (Self::PASSES, "passes"),
        (Self::PRESSURE, "pressure"),
        (Self::COPY, "copy"),
        (Self::KILLS, "kills"),
        (Self::HAND_OVER, "hand-over"),
        (Self::FOLLOW, "follow"),
        (Self::PIPELINED, "pipelined"),
        (Self::RESET, "reset"),
    ];

    /// Everything a seed asks for: most of it most of the time.
    pub fn of_seed(seed: u64) -> Self {
        let mut random = guest_tools::random::Random::of(seed, 77);
        let mut switches = Switches(0);
        for (switch, of_eight) in [
            (Self::EARLY, 7),
            (Self::GARBAGE, 5),
            (Self::DELAY, 7),
            (Self::PASSES, 5),
            (Self::PRESSURE, 3),
            (Self::COPY, 1),
            (Self::KILLS, 3),
            (Self::HAND_OVER, 2),
            (Self::FOLLOW, 3),
            (Self::PIPELINED, 3),
        ] {
            if random.below(8) < of_eight {
                switches.0 |= switch.0;
            }
        }
        switches
    }

    /// Whether it may do this.
    pub fn has(self, switch: Switches) -> bool {
        self.0 & switch.0 != 0
    }

    /// The same with this.
    #[must_use]
    pub fn with(self, switch: Switches) -> Self {
        Switches(self.0 | switch.0)
    }

    /// The same without this.
    #[must_use]
    pub fn without(self, switch: Switches) -> Self {
        Switches(self.0 & !switch.0)
    }

    /// One by one.
    pub fn each(self) -> impl Iterator<Item = Switches> {
        Self::NAMES.into_iter().map(|(switch, _)| switch).filter(move |switch| self.has(*switch))
    }

    /// Their names, separated by commas; `none`.
    pub fn names(self) -> String {
        let names: Vec<_> = Self::NAMES.iter().filter(|(switch, _)| self.has(*switch)).map(|(_, name)| *name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(",") }
    }

    /// The inverse of [`Switches::names`].
    ///
    /// # Errors
    /// When a name is not one of them.
    pub fn parse(names: &str) -> Result<Self, String> {
        let mut switches = Switches(0);
        for name in names.split(',').filter(|name| *name != "none") {
            let found = Self::NAMES.iter().find(|(_, known)| *known == name);
            let (switch, _) = found.ok_or_else(|| {
                let known = Self::NAMES.map(|(_, name)| name).join(", ");
                format!("'{name}' is nothing an adversary does; there are {known}, or none")
            })?;
            switches.0 |= switch.0;
        }
        Ok(switches)
    }
}
