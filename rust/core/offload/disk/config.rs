//! What a disk tier is built for, and what it may do now.

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::offload::tier::EvictionPolicy;
use crate::pool::MAX_BLOCKS;

/// Which blocks of the host the disk tier takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admit {
    /// Every block that a store publishes.
    #[default]
    All,
    /// Blocks that were hit, or that are stored again after an eviction, and the blocks before
    /// them.
    Returned,
}

/// What the disk tier may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskMode {
    /// Neither demotes nor promotes. Lookups see the host only. The index stays.
    #[default]
    Off,
    /// Promotes, but no demotes.
    ReadOnly,
    /// Demotes and promotes.
    On,
}

impl DiskMode {
    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::ReadOnly => "read_only",
            Self::On => "on",
        }
    }
}

/// By name.
impl FromStr for Admit {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "all" => Ok(Self::All),
            "returned" => Ok(Self::Returned),
            other => Err(Error::Config(format!(
                "disk_admit is {other:?}: it must be \"all\" or \"returned\""
            ))),
        }
    }
}

/// By name.
impl FromStr for DiskMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = [Self::Off, Self::ReadOnly, Self::On].into_iter();
        known.clone().find(|mode| mode.name() == name).ok_or_else(|| {
            Error::Config(format!(
                "the disk mode is {name:?}: it must be \"on\", \"read_only\" or \"off\""
            ))
        })
    }
}

/// What a disk tier is built for. Its blocks are as large as the host's slots, and it counts them.
#[derive(Clone, Copy, Debug)]
pub struct DiskConfig {
    /// Slots of the disk tier, all of them usable.
    pub num_blocks: usize,
    /// Which slots are evicted first.
    pub policy: EvictionPolicy,
    /// Which blocks it takes.
    pub admit: Admit,
    /// The most slots that demotes copy at a time, and the most that promotes copy. Late jobs count
    /// until they end.
    pub max_in_flight_blocks: usize,
    /// A lookup waits for the disk only if the disk adds this many tokens to the hit.
    pub min_promote_tokens: usize,
}

impl DiskConfig {
    /// LRU, all blocks, 64 slots in flight each way, no least number of tokens.
    pub fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks,
            policy: EvictionPolicy::Lru,
            admit: Admit::All,
            max_in_flight_blocks: 64,
            min_promote_tokens: 0,
        }
    }

    /// Refuses values that no tier can have.
    pub(in crate::offload) fn check(&self) -> Result<()> {
        if !(1..MAX_BLOCKS).contains(&self.num_blocks) {
            return Err(Error::Config(format!(
                "num_disk_blocks is {}: it must be 1 to {}",
                self.num_blocks,
                MAX_BLOCKS - 1
            )));
        }
        if self.max_in_flight_blocks == 0 {
            return Err(Error::Config(
                "max_disk_blocks_in_flight is 0: it must be 1 or more, because jobs copy whole \
                 blocks"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}
