//! Newtypes over integers, so that no call confuses a block id with a count or a group.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use minicbor::{Decode, Encode};

/// A block's index in its pool. Id 0 is the null block: a placeholder that is never allocated,
/// freed, hashed or moved.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Pod, Zeroable,
)]
#[cbor(transparent)]
#[repr(transparent)]
pub struct BlockId(#[n(0)] pub u32);

impl BlockId {
    /// The null block, id 0.
    pub const NULL: Self = Self(0);

    /// Whether this is the null block.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The id as an index into per-block arrays.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A group's position in the model's list of groups. A group is the layers that share a block
/// table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct GroupId(#[n(0)] pub u16);

/// The id of a store or a load in flight. Ids count up from 1, and no id returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);
