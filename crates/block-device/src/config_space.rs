//! Features and the configuration space of the device (virtio 1.2, section 5.2).

use crate::image::{Image, SECTOR_BYTES};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The most queues a device can have.
pub const QUEUES_MAX: u16 = 64;
/// The most descriptors a queue can have (QEMU's own limit is the same).
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// The most data segments a request can have.
pub const SEGMENTS_MAX: u32 = 1024;
/// The most bytes of data a request can have. What the guest is told (`size_max`, `seg_max`) keeps it below.
pub const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// The most sectors of one discard or write-zeroes segment: 1 GiB.
pub(crate) const RANGE_SECTORS_MAX: u32 = (1 << 30) / SECTOR_BYTES as u32;
/// The most segments of one discard or write-zeroes request.
pub(crate) const RANGES_MAX: u32 = 32;
/// What the guest is told of a write-zeroes request: one segment of 64 MiB. Storage may have to write as much, and then it is as large as
/// the largest write. Guests that began under an earlier worker were told more ([`RANGE_SECTORS_MAX`]), which stays allowed.
const ZEROES_SECTORS_MAX: u32 = (REQUEST_BYTES_MAX / SECTOR_BYTES) as u32;
const ZEROES_RANGES_MAX: u32 = 1;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
/// VHOST_F_LOG_ALL: every page that is written is to be marked in the VMM's log.
pub(crate) const LOG_ALL: u64 = 1 << 26;

/// Bytes of `struct virtio_blk_config` up to and with the write-zeroes fields.
const CONFIG_BYTES: usize = 60;

pub(crate) const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// The features offered for an image, with or without a write cache that the guest has to flush.
pub(crate) fn features(image: &Image, write_cache: bool) -> u64 {
    let mut features = bit(VIRTIO_F_VERSION_1)
        | bit(VIRTIO_RING_F_INDIRECT_DESC)
        | bit(VIRTIO_RING_F_EVENT_IDX)
        | bit(VIRTIO_BLK_F_SIZE_MAX)
        | bit(VIRTIO_BLK_F_SEG_MAX)
        | bit(VIRTIO_BLK_F_BLK_SIZE)
        | bit(VIRTIO_BLK_F_TOPOLOGY)
        | bit(VIRTIO_BLK_F_MQ)
        | PROTOCOL_FEATURES;
    if write_cache {
        features |= bit(VIRTIO_BLK_F_FLUSH);
    }
    if image.read_only() {
        features |= bit(VIRTIO_BLK_F_RO);
    } else {
        // Write-zeroes always works (by writing zeros); discard only where the storage can let go.
        features |= bit(VIRTIO_BLK_F_WRITE_ZEROES);
        if image.discard() {
            features |= bit(VIRTIO_BLK_F_DISCARD);
        }
    }
    features
}

/// `struct virtio_blk_config`, little-endian as virtio 1 has it.
pub(crate) fn config_space(image: &Image, segments_max: u32, queues: u16) -> [u8; CONFIG_BYTES] {
    let mut bytes = [0u8; CONFIG_BYTES];
    let mut put = |offset: usize, field: &[u8]| bytes[offset..offset + field.len()].copy_from_slice(field);
    let block_bytes = image.logical_block_bytes();
    let physical_bytes = image.physical_block_bytes().max(block_bytes);
    let exponent = (physical_bytes / block_bytes).ilog2() as u8;
    let block_sectors = block_bytes / SECTOR_BYTES as u32;
    put(0, &(image.size_bytes() / SECTOR_BYTES).to_le_bytes());
    put(8, &segment_bytes_max(segments_max).to_le_bytes());
    put(12, &segments_max.to_le_bytes());
    put(20, &block_bytes.to_le_bytes());
    put(24, &[exponent]);
    put(26, &1u16.to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &RANGES_MAX.to_le_bytes());
    put(44, &(physical_bytes / SECTOR_BYTES as u32).max(block_sectors).to_le_bytes());
    put(48, &ZEROES_SECTORS_MAX.to_le_bytes());
    put(52, &ZEROES_RANGES_MAX.to_le_bytes());
    put(56, &[u8::from(image.discard())]);
    bytes
}

/// `size_max`: so that no legal request is above [`REQUEST_BYTES_MAX`].
pub(crate) fn segment_bytes_max(segments_max: u32) -> u32 {
    let bytes = REQUEST_BYTES_MAX / u64::from(segments_max.max(1));
    u32::try_from(bytes).unwrap_or(u32::MAX).min(16 << 20) & !4095
}

/// The part of the configuration space that was asked for; zeros beyond its end, as a device has them.
pub(crate) fn config_part(config: &[u8], offset: u32, size: u32) -> Vec<u8> {
    let mut part = vec![0u8; size as usize];
    let start = (offset as usize).min(config.len());
    let count = (config.len() - start).min(part.len());
    part[..count].copy_from_slice(&config[start..start + count]);
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_legal_request_is_within_the_bound() {
        for segments in [1, 2, 126, 254, 1022] {
            let bytes = segment_bytes_max(segments);
            assert!(bytes >= 4096 && bytes.is_multiple_of(4096));
            assert!(u64::from(bytes) * u64::from(segments) <= REQUEST_BYTES_MAX);
        }
    }

    #[test]
    fn a_part_beyond_the_end_is_zeros() {
        let config = [7u8; 60];
        assert_eq!(config_part(&config, 0, 57), vec![7u8; 57]);
        let part = config_part(&config, 58, 4);
        assert_eq!(part, [7, 7, 0, 0]);
        assert_eq!(config_part(&config, 4000, 2), [0, 0]);
    }
}
