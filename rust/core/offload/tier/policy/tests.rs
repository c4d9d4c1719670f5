//! What holds for every policy, and how users choose one.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

#[test]
fn a_policy_is_chosen_by_its_name() {
    for policy in EvictionPolicy::ALL {
        assert_eq!(policy.name().parse(), Ok(policy));
    }
    assert_eq!(EvictionPolicy::ALL[0], EvictionPolicy::default());
    for (given, nearest) in [("hit_density", "hit-density"), ("lfu", "lru"), ("", "lru")] {
        let message = given.parse::<EvictionPolicy>().unwrap_err().to_string();
        let expected = format!(
            "policy {given:?}: the nearest known is {nearest:?}; it must be one of \"lru\", \
             \"hit-density\""
        );
        assert_eq!(message, expected);
    }
}

#[test]
fn distance_counts_inserted_deleted_and_replaced_letters() {
    assert_eq!(distance("lru", "lru"), 0);
    assert_eq!(distance("lru", "lur"), 2);
    assert_eq!(distance("lru", "slru"), 1);
    assert_eq!(distance("hit-density", "density"), 4);
    assert_eq!(distance("lru", ""), 3);
}

#[test]
fn a_policy_takes_the_bytes_that_it_states() {
    let num_slots = 10_000;
    for (known, policy) in EvictionPolicy::ALL.map(|known| (known, known.build(num_slots + 1))) {
        let memory_bytes = with_policy!(&policy, policy => policy.memory_bytes());
        let stated_bytes = known.slot_bytes() * (num_slots as usize + 1);
        assert!(memory_bytes <= stated_bytes, "{known:?}: {memory_bytes} of {stated_bytes} bytes");
        assert!(memory_bytes + 100 > stated_bytes, "{known:?}: {memory_bytes} of {stated_bytes}");
    }
}
