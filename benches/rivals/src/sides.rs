//! The same work in each program's own terms.

use std::collections::VecDeque;

use kvbm_logical::blocks::ImmutableBlock;
use kvbm_logical::{BlockManager, BlockRegistry, SequenceHash};
use kvstow_core::hash::{HashOptions, hash_tokens};
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::key::Hashes;
use kvstow_core::pool::BlockPool;

use crate::floor::{shuffled, time};

#[cfg(has_mistral)]
#[expect(dead_code, reason = "the bench calls what a request calls")]
mod mistral {
    include!(concat!(env!("OUT_DIR"), "/mistral.rs"));
}

/// The size of a pool and of its prompts.
pub(crate) struct Shape {
    pub(crate) num_blocks: usize,
    pub(crate) num_prompt_blocks: usize,
    pub(crate) is_shuffled: bool,
}

/// A program. Each operation takes whole prompts and returns its nanoseconds.
pub(crate) trait Side {
    /// Allocates blocks for the prompts, evicting others, and publishes them. Requests hold them.
    fn publish(&mut self, prompts: &[usize]) -> f64;

    /// Frees the blocks of the requests that began first, the tail of each prompt first.
    fn free(&mut self, num_requests: usize) -> f64;

    /// Finds the blocks of prompts that are cached.
    fn look_up(&mut self, prompts: &[usize]) -> f64;

    /// Looks up prompts that are cached and takes a reference on each block. The references are
    /// dropped afterwards, without counting.
    fn admit(&mut self, prompts: &[usize]) -> f64;

    /// Frees and forgets everything.
    fn reset(&mut self);
}

/// All sides, with their names.
pub(crate) fn all(shape: &Shape, num_prompts: usize) -> Vec<(&'static str, Box<dyn Side>)> {
    vec![
        ("kvstow core", Box::new(Kvstow::new(shape, num_prompts))),
        ("kvbm-logical", Box::new(Kvbm::new(shape, num_prompts))),
        #[cfg(has_mistral)]
        ("mistral.rs", Box::new(Mistral::new(shape, num_prompts))),
    ]
}

/// The tokens of a prompt, one a block: no program compares tokens here.
fn tokens(which: usize, num_prompt_blocks: usize) -> impl Iterator<Item = u64> {
    (which as u64 * 1_000_003..).take(num_prompt_blocks)
}

const GROUP: GroupId = GroupId(0);

struct Kvstow {
    pool: BlockPool,
    prompts: Vec<Hashes>,
    held: VecDeque<Vec<BlockId>>,
}

impl Kvstow {
    fn new(shape: &Shape, num_prompts: usize) -> Self {
        let prompt = |which| {
            let tokens: Vec<_> = tokens(which, shape.num_prompt_blocks).collect();
            hash_tokens(&tokens, 1, HashOptions::default()).unwrap()
        };
        let mut pool = BlockPool::new(shape.num_blocks + 1, false).unwrap();
        if shape.is_shuffled {
            pool.allocate(shape.num_blocks, &mut Vec::new()).unwrap();
            let all: Vec<_> = shuffled(shape.num_blocks).iter().map(|id| BlockId(id + 1)).collect();
            pool.free(&all).unwrap();
        }
        Self { pool, prompts: (0..num_prompts).map(prompt).collect(), held: VecDeque::new() }
    }
}

impl Side for Kvstow {
    fn publish(&mut self, prompts: &[usize]) -> f64 {
        let Self { pool, prompts: all, held } = self;
        let (new, nanoseconds) = time(|| {
            let publish = |&which: &usize| {
                let mut ids = Vec::with_capacity(all[which].len());
                pool.allocate(all[which].len(), &mut ids).unwrap();
                pool.cache(&ids, &all[which], GROUP).unwrap();
                ids
            };
            prompts.iter().map(publish).collect::<Vec<_>>()
        });
        held.extend(new.into_iter().map(|ids| ids.into_iter().rev().collect()));
        nanoseconds
    }

    fn free(&mut self, num_requests: usize) -> f64 {
        let oldest: Vec<_> = self.held.drain(..num_requests).collect();
        time(|| oldest.iter().for_each(|ids| self.pool.free(ids).unwrap())).1
    }

    fn look_up(&mut self, prompts: &[usize]) -> f64 {
        let look_up = |&which: &usize| self.pool.lookup(&self.prompts[which], GROUP).unwrap();
        let (hits, nanoseconds) = time(|| prompts.iter().map(look_up).collect::<Vec<_>>());
        assert!(hits.iter().zip(prompts).all(|(it, &which)| it.len() == self.prompts[which].len()));
        nanoseconds
    }

    fn admit(&mut self, prompts: &[usize]) -> f64 {
        let Self { pool, prompts: all, .. } = self;
        let (hits, nanoseconds) = time(|| {
            let admit = |&which: &usize| {
                let hit = pool.lookup(&all[which], GROUP).unwrap();
                pool.touch(&hit).unwrap();
                hit
            };
            prompts.iter().map(admit).collect::<Vec<_>>()
        });
        for mut hit in hits {
            hit.reverse();
            self.pool.free(&hit).unwrap();
        }
        nanoseconds
    }

    fn reset(&mut self) {
        self.free(self.held.len());
        assert!(self.pool.reset());
    }
}

/// The type that names a memory in kvbm-logical.
#[derive(Clone)]
struct Device;

const KVBM_BLOCK_SIZE: usize = 16;

struct Kvbm {
    manager: BlockManager<Device>,
    prompts: Vec<Vec<SequenceHash>>,
    held: VecDeque<Vec<ImmutableBlock<Device>>>,
}

impl Kvbm {
    fn new(shape: &Shape, num_prompts: usize) -> Self {
        let manager = BlockManager::builder()
            .block_count(shape.num_blocks)
            .block_size(KVBM_BLOCK_SIZE)
            .registry(BlockRegistry::builder().build())
            .build()
            .unwrap();
        if shape.is_shuffled {
            let all = manager.allocate_blocks(shape.num_blocks).unwrap();
            let mut all: Vec<_> = all.into_iter().map(Some).collect();
            for place in shuffled(shape.num_blocks) {
                all[place as usize] = None; // returns the block to the pool
            }
        }
        let prompt = |which| {
            let mut parent = None;
            let hash = |(position, token): (usize, u64)| {
                let hash = (token + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                SequenceHash::new(hash, parent.replace(hash), position as u64)
            };
            tokens(which, shape.num_prompt_blocks).enumerate().map(hash).collect()
        };
        Self { manager, prompts: (0..num_prompts).map(prompt).collect(), held: VecDeque::new() }
    }
}

impl Side for Kvbm {
    fn publish(&mut self, prompts: &[usize]) -> f64 {
        let Self { manager, prompts: all, held } = self;
        let (new, nanoseconds) = time(|| {
            let publish = |&which: &usize| {
                let blocks = manager.allocate_blocks(all[which].len()).unwrap();
                let staged = blocks.into_iter().zip(&all[which]);
                let staged =
                    staged.map(|(block, hash)| block.stage(*hash, KVBM_BLOCK_SIZE).ok().unwrap());
                manager.register_blocks(staged.collect())
            };
            prompts.iter().map(publish).collect::<Vec<_>>()
        });
        held.extend(new.into_iter().map(|blocks| blocks.into_iter().rev().collect()));
        nanoseconds
    }

    fn free(&mut self, num_requests: usize) -> f64 {
        let oldest: Vec<_> = self.held.drain(..num_requests).collect();
        time(|| drop(oldest)).1
    }

    /// A lookup without references is not in its interface, so this takes and drops them.
    fn look_up(&mut self, prompts: &[usize]) -> f64 {
        time(|| prompts.iter().for_each(|&it| drop(self.manager.match_blocks(&self.prompts[it])))).1
    }

    fn admit(&mut self, prompts: &[usize]) -> f64 {
        let admit = |&which: &usize| self.manager.match_blocks(&self.prompts[which]);
        let (hits, nanoseconds) = time(|| prompts.iter().map(admit).collect::<Vec<_>>());
        assert!(hits.iter().zip(prompts).all(|(it, &which)| it.len() == self.prompts[which].len()));
        hits.into_iter().flat_map(|hit| hit.into_iter().rev()).for_each(drop);
        nanoseconds
    }

    fn reset(&mut self) {
        self.held.clear();
        self.manager.reset_inactive_pool().unwrap();
    }
}

#[cfg(has_mistral)]
struct Mistral {
    pool: mistral::block_pool::BlockPool,
    prompts: Vec<Vec<mistral::block_hash::BlockHash>>,
    held: VecDeque<Vec<usize>>,
}

#[cfg(has_mistral)]
impl Mistral {
    fn new(shape: &Shape, num_prompts: usize) -> Self {
        let mut pool = mistral::block_pool::BlockPool::new(shape.num_blocks + 1, true, 1);
        if shape.is_shuffled {
            pool.get_new_blocks(shape.num_blocks).unwrap();
            let all: Vec<_> =
                shuffled(shape.num_blocks).iter().map(|&id| id as usize + 1).collect();
            pool.free_blocks(&all);
        }
        let prompt = |which| {
            let tokens = tokens(which, shape.num_prompt_blocks).map(|it| it as u32);
            mistral::block_hash::compute_block_hashes(&tokens.collect::<Vec<_>>(), 1, &[], &[])
        };
        Self { pool, prompts: (0..num_prompts).map(prompt).collect(), held: VecDeque::new() }
    }

    /// As mistral.rs's own manager: block by block, up to the first that is not cached.
    fn hit(&self, which: usize) -> Vec<usize> {
        let cached = |hash: &_| Some(self.pool.get_cached_block(*hash, &[0])?[0]);
        self.prompts[which].iter().map_while(cached).collect()
    }
}

#[cfg(has_mistral)]
impl Side for Mistral {
    fn publish(&mut self, prompts: &[usize]) -> f64 {
        let Self { pool, prompts: all, held } = self;
        let (new, nanoseconds) = time(|| {
            let publish = |&which: &usize| {
                let ids = pool.get_new_blocks(all[which].len()).unwrap();
                pool.cache_full_blocks(&ids, &all[which], 0, ids.len(), 0);
                ids
            };
            prompts.iter().map(publish).collect::<Vec<_>>()
        });
        held.extend(new.into_iter().map(|ids| ids.into_iter().rev().collect()));
        nanoseconds
    }

    fn free(&mut self, num_requests: usize) -> f64 {
        let oldest: Vec<_> = self.held.drain(..num_requests).collect();
        time(|| oldest.iter().for_each(|ids| self.pool.free_blocks(ids))).1
    }

    fn look_up(&mut self, prompts: &[usize]) -> f64 {
        let look_up = |&which: &usize| self.hit(which);
        let (hits, nanoseconds) = time(|| prompts.iter().map(look_up).collect::<Vec<_>>());
        assert!(hits.iter().zip(prompts).all(|(it, &which)| it.len() == self.prompts[which].len()));
        nanoseconds
    }

    fn admit(&mut self, prompts: &[usize]) -> f64 {
        let (hits, nanoseconds) = time(|| {
            let mut admit = |&which: &usize| {
                let hit = self.hit(which);
                self.pool.touch(&hit);
                hit
            };
            prompts.iter().map(&mut admit).collect::<Vec<_>>()
        });
        for mut hit in hits {
            hit.reverse();
            self.pool.free_blocks(&hit);
        }
        nanoseconds
    }

    fn reset(&mut self) {
        self.free(self.held.len());
        assert!(self.pool.reset_prefix_cache());
    }
}
