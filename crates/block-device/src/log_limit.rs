//! A limit on log lines that a guest can cause.

/// Lets the first few lines through, then ever fewer: a guest must not fill the host's log.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    count: u64,
}

impl LogLimit {
    /// Lines that always pass.
    const ALWAYS: u64 = 8;

    /// Whether this line may be written; then the number of its like so far.
    pub(crate) fn next(&mut self) -> Option<u64> {
        self.count += 1;
        (self.count <= Self::ALWAYS || self.count.is_power_of_two()).then_some(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_lines_become_few() {
        let mut limit = LogLimit::default();
        let passed = (0..1_000_000).filter(|_| limit.next().is_some()).count();
        assert!((8..32).contains(&passed), "{passed}");
    }
}
