//! What a scheduler is built for, and the checks of it.

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::group::{Attention, Group};
use crate::pool::MAX_BLOCKS;

use super::EvictionPolicy;
use super::disk::DiskConfig;

/// The most device blocks that a slot holds.
pub const MAX_BLOCKS_PER_SLOT: usize = 1 << 10;

/// The most ranks that copy their parts of one job.
pub const MAX_WORLD_SIZE: usize = 1 << 16;

/// When blocks are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum Mode {
    /// As soon as they are computed.
    #[default]
    #[n(0)]
    Eager,
    /// When the device is about to evict them.
    #[n(1)]
    Lazy,
}

impl Mode {
    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Lazy => "lazy",
        }
    }
}

/// What a scheduler is built for. A snapshot keeps what the scheduler that it fills must share.
#[derive(Clone, Debug, Encode, Decode)]
pub struct OffloadConfig {
    /// Slots of the host tier, all of them usable.
    #[n(0)]
    pub num_host_blocks: usize,
    /// The device's groups.
    #[n(1)]
    pub groups: Vec<Group>,
    /// Device blocks per slot: consecutive blocks of one prompt, under the key of the last. More
    /// than 1 requires full attention in all groups.
    #[n(2)]
    pub blocks_per_slot: usize,
    /// When blocks are stored.
    #[n(3)]
    pub mode: Mode,
    /// Which slots are evicted first.
    #[n(4)]
    pub policy: EvictionPolicy,
    /// Workers that each copy their part of every job.
    #[n(5)]
    pub world_size: usize,
    /// Blocks of the device pool, the null block included. The scheduler refuses ids outside it.
    #[cbor(skip)]
    pub num_device_blocks: usize,
    /// Whether to record events.
    #[cbor(skip)]
    pub events: bool,
    /// A block is stored once this many requests have seen it and every block before it.
    #[cbor(skip)]
    pub store_threshold: u8,
    /// The disk tier below the host. None for no such tier. A snapshot does not hold it.
    #[cbor(skip)]
    pub disk: Option<DiskConfig>,
}

impl OffloadConfig {
    /// Eager, LRU, one worker, any device block, no events.
    pub fn new(num_host_blocks: usize, groups: Vec<Group>) -> Self {
        Self {
            num_host_blocks,
            groups,
            blocks_per_slot: 1,
            mode: Mode::Eager,
            policy: EvictionPolicy::Lru,
            world_size: 1,
            num_device_blocks: MAX_BLOCKS,
            events: false,
            store_threshold: 1,
            disk: None,
        }
    }

    /// Refuses values that no scheduler can have.
    pub(super) fn check(&self) -> Result<()> {
        let Self { num_host_blocks, groups, blocks_per_slot, mode, world_size, .. } = self;
        let refuse = |why| Err(Error::Config(why));
        if !(1..=MAX_WORLD_SIZE).contains(world_size) {
            return refuse(format!("world_size is {world_size}: it must be 1 to {MAX_WORLD_SIZE}"));
        }
        if !(1..=MAX_BLOCKS_PER_SLOT).contains(blocks_per_slot) {
            return refuse(format!(
                "{blocks_per_slot} blocks per slot: it must be 1 to {MAX_BLOCKS_PER_SLOT}"
            ));
        }
        if num_host_blocks.saturating_mul(*blocks_per_slot) > MAX_BLOCKS {
            return refuse(format!(
                "{num_host_blocks} host blocks of {blocks_per_slot} device blocks each: the \
                 product must be at most {MAX_BLOCKS}"
            ));
        }
        if *mode == Mode::Lazy && *blocks_per_slot > 1 {
            return refuse(format!(
                "{blocks_per_slot} blocks per slot in lazy mode: the device evicts blocks one by \
                 one, so take 1, or the eager mode"
            ));
        }
        let skips = |group: &Group| group.attention != Attention::Full;
        if *blocks_per_slot > 1 && groups.iter().any(skips) {
            return refuse(format!(
                "{blocks_per_slot} blocks per slot with a group that skips blocks: the first \
                 blocks of a slot may leave the device before its last is computed, so take 1"
            ));
        }
        Ok(())
    }
}
