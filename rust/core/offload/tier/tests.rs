//! The cost of a failed store, in looks at slots.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::chains::looks;
use super::*;

fn hashes(chain: u16, len: u16) -> Vec<BlockHash> {
    let hash = |at: u16| {
        let mut hash = BlockHash::default();
        hash[..2].copy_from_slice(&chain.to_le_bytes());
        hash[2..4].copy_from_slice(&at.to_le_bytes());
        hash
    };
    (0..len).map(hash).collect()
}

#[test]
fn a_failed_store_looks_only_at_its_own_slots_and_those_below() {
    const NUM_SLOTS: usize = 4_096;
    for policy in EvictionPolicy::ALL {
        let mut tier = Tier::new("num_host_blocks", NUM_SLOTS, policy, false).unwrap();
        for chain in 0..255 {
            tier.reserve_chain(&hashes(chain, 16), GroupId(0), BlockId::NULL, usize::MAX).unwrap();
        }
        // The second store continues the chain of the first one.
        let chain = hashes(255, 16);
        let slots =
            tier.reserve_chain(&chain[..8], GroupId(0), BlockId::NULL, usize::MAX).unwrap().slots;
        let last = *slots.last().unwrap();
        tier.reserve_chain(&chain[8..], GroupId(0), last, usize::MAX).unwrap();
        assert_eq!(tier.slots.num_filling, NUM_SLOTS);
        looks::take();
        tier.fence(&slots).unwrap();
        let num_looks = looks::take();
        assert_eq!(tier.slots.num_filling, NUM_SLOTS - 16);
        assert!(num_looks <= 5 * 16, "{num_looks} looks for 16 slots of {NUM_SLOTS}");
    }
}
