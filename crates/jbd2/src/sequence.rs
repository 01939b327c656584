//! Transaction sequence numbers: 32 bits, compared modulo 2^32 so that they may wrap.

/// Whether `a` comes after `b` (`tid_gt` of jbd2).
pub fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Whether `a` is `b` or comes after it (`tid_geq` of jbd2).
pub fn is_at_or_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) >= 0
}

/// The later of two sequence numbers.
pub fn latest(a: u32, b: u32) -> u32 {
    if is_after(a, b) { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_survives_the_wrap() {
        assert!(is_after(1, 0));
        assert!(is_after(0, u32::MAX));
        assert!(is_after(5, u32::MAX - 5));
        assert!(!is_after(u32::MAX, 0));
        assert!(!is_after(7, 7));
        assert!(is_at_or_after(7, 7));
        assert_eq!(latest(3, u32::MAX), 3);
    }
}
