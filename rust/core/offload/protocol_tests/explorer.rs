//! A search of every state that a world can reach, breadth first.
//!
//! It keeps 128 bits of each state's projection, so a violation is reported with a shortest trace.
//! Two states that have one projection count as one. The search checks that this is sound on a
//! sample: it expands the second state too, and compares the projections of all successors.

use std::collections::HashMap;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use xxhash_rust::xxh3::xxh3_128;

/// One in this many states that were seen before is expanded again, and all of the first.
const SAMPLED: u32 = 61;

/// What is searched.
pub(super) trait World: Clone {
    type Action: Copy + Debug;

    /// All that can happen now.
    fn actions(&self) -> Vec<Self::Action>;

    /// Lets it happen. Panics, or returns what does not hold.
    fn apply(&mut self, action: Self::Action) -> Result<(), String>;

    /// All that decides what can happen later, in a form without names and counters.
    fn project(&self) -> Vec<u8>;
}

/// The size of a world that was searched to its end.
#[derive(Debug)]
pub(super) struct Size {
    pub(super) num_states: usize,
    pub(super) num_transitions: usize,
    pub(super) depth: usize,
}

/// A shortest way to a violation.
#[derive(Debug)]
pub(super) struct Violation {
    pub(super) what: String,
    pub(super) trace: Vec<String>,
}

struct Search<W: World> {
    /// By projection: the number of the state.
    seen: HashMap<u128, u32>,
    /// By state: the state before it, and what led here.
    before: Vec<(u32, Option<W::Action>)>,
    /// By state: what its successors are, once it was expanded.
    successors: Vec<u128>,
    /// States that were seen before: the number of the first, and the second one's successors.
    samples: Vec<(u32, u128)>,
    num_transitions: usize,
}

/// Searches a world to its end.
pub(super) fn explore<W: World>(first: W, max_states: usize) -> Result<Size, Violation> {
    let mut search = Search {
        seen: HashMap::from([(xxh3_128(&first.project()), 0)]),
        before: vec![(0, None)],
        successors: Vec::new(),
        samples: Vec::new(),
        num_transitions: 0,
    };
    let mut level = vec![first];
    let mut depth = 0;
    while !level.is_empty() {
        let mut next = Vec::new();
        for world in level {
            search.expand(&world, &mut next)?;
        }
        level = next;
        depth += usize::from(!level.is_empty());
        assert!(search.before.len() <= max_states, "the world has more than {max_states} states");
    }
    for &(state, successors) in &search.samples {
        if search.successors[state as usize] != successors {
            let what = "states with one projection have other successors".to_owned();
            return Err(Violation { what, trace: search.trace(state, None) });
        }
    }
    let num_states = search.before.len();
    Ok(Size { num_states, num_transitions: search.num_transitions, depth })
}

impl<W: World> Search<W> {
    /// Visits the successors of a state, and appends those that are new.
    fn expand(&mut self, world: &W, next: &mut Vec<W>) -> Result<(), Violation> {
        let state = u32::try_from(self.successors.len()).unwrap();
        let mut found = Vec::new();
        for action in world.actions() {
            let after = step(world, action)
                .map_err(|what| Violation { what, trace: self.trace(state, Some(action)) })?;
            self.num_transitions += 1;
            let projection = xxh3_128(&after.project());
            found.push(projection);
            let number = u32::try_from(self.before.len()).unwrap();
            let known = *self.seen.entry(projection).or_insert(number);
            if known == number {
                self.before.push((state, Some(action)));
                next.push(after);
            } else if number < SAMPLED || self.num_transitions.is_multiple_of(SAMPLED as usize) {
                let successors = after.actions().into_iter().map(|action| {
                    step(&after, action).map_or(0, |after| xxh3_128(&after.project()))
                });
                let successors = digest(successors.collect());
                self.samples.push((known, successors));
            }
        }
        self.successors.push(digest(found));
        Ok(())
    }

    fn trace(&self, state: u32, last: Option<W::Action>) -> Vec<String> {
        let mut trace: Vec<String> = last.iter().map(|action| format!("{action:?}")).collect();
        let mut at = state;
        while let (before, Some(action)) = self.before[at as usize] {
            trace.push(format!("{action:?}"));
            at = before;
        }
        trace.reverse();
        trace
    }
}

/// What all successors are together, whatever their order.
fn digest(mut projections: Vec<u128>) -> u128 {
    projections.sort_unstable();
    let bytes: Vec<u8> = projections.iter().flat_map(|it| it.to_le_bytes()).collect();
    xxh3_128(&bytes)
}

fn step<W: World>(world: &W, action: W::Action) -> Result<W, String> {
    let mut after = world.clone();
    match catch_unwind(AssertUnwindSafe(|| after.apply(action))) {
        Ok(Ok(())) => Ok(after),
        Ok(Err(what)) => Err(what),
        Err(panic) => Err(panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|&what| what.to_owned()))
            .unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A light that breaks when it is switched on for the third time.
    #[derive(Clone)]
    struct Light {
        is_on: bool,
        num_switched: u8,
        counts: bool,
    }

    #[derive(Clone, Copy, Debug)]
    struct Switch;

    impl World for Light {
        type Action = Switch;

        fn actions(&self) -> Vec<Switch> {
            vec![Switch; usize::from(self.num_switched < 100)]
        }

        fn apply(&mut self, Switch: Switch) -> Result<(), String> {
            self.is_on = !self.is_on;
            self.num_switched += 1;
            if self.counts && self.num_switched == 5 { Err("broken".to_owned()) } else { Ok(()) }
        }

        fn project(&self) -> Vec<u8> {
            if self.counts { vec![self.num_switched] } else { vec![u8::from(self.is_on)] }
        }
    }

    #[test]
    fn search_finds_the_shortest_trace() {
        let light = Light { is_on: false, num_switched: 0, counts: true };
        let found = explore(light, 100).unwrap_err();
        assert_eq!((found.what.as_str(), found.trace), ("broken", vec!["Switch".to_owned(); 5]));
    }

    #[test]
    fn search_ends_where_states_repeat() {
        let light = Light { is_on: false, num_switched: 0, counts: false };
        let size = explore(light, 100).unwrap();
        assert_eq!((size.num_states, size.num_transitions, size.depth), (2, 2, 1));
    }

    #[test]
    fn search_finds_a_projection_that_leaves_out_too_much() {
        // It merges the light that may be switched once more with the one that may not.
        let light = Light { is_on: false, num_switched: 98, counts: false };
        let found = explore(light, 100).unwrap_err();
        assert_eq!(found.what, "states with one projection have other successors");
    }
}
