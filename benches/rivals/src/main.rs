//! kvstow's core, other Rust block pools, and the floor, for one size of pool.
//!
//! `benches/compare/rivals.py` starts this program and drives it through its standard input, so that
//! these sides take turns with those in Python. For each line `round`, every side handles the next
//! prompts, and the program prints nanoseconds a block: a line `SIDE: CLEAN EVICT FREE LOOKUP ADMIT`
//! for each side (`-` where the round has none), then an empty line. The line `reset` empties all pools.
//!
//! ```text
//!   kvstow-rivals NUM_BLOCKS NUM_PROMPT_BLOCKS ordered|shuffled
//! ```

#[path = "../../common/floor.rs"]
mod floor;
mod sides;

use std::io::{self, BufRead};

use floor::{Floor, NUM_ROUND_BLOCKS};
use sides::{Shape, Side};

/// The order of requests in a pool. `schedule` in `benches/compare/rivals.py` has the same.
struct Schedule {
    num_resident: usize,
    num_per_round: usize,
    /// Prompts that requests hold at a time: a quarter of the pool.
    num_held: usize,
    num_prompts: usize,
    /// Prompts published since the last reset.
    num_published: usize,
}

impl Schedule {
    fn new(shape: &Shape) -> Self {
        let num_resident = shape.num_blocks / shape.num_prompt_blocks;
        let num_per_round =
            (NUM_ROUND_BLOCKS / shape.num_prompt_blocks).min(num_resident / 4).max(1);
        // Twice the blocks of the pool, so that each prompt is evicted before its next turn.
        let num_prompts = 2 * (num_resident + num_per_round);
        let num_held = num_resident / 4;
        Self { num_resident, num_per_round, num_held, num_prompts, num_published: 0 }
    }

    /// The next round of each side: nanoseconds a block by operation.
    fn round(&mut self, sides: &mut [(&str, Box<dyn Side>)], num_prompt_blocks: usize) {
        let new: Vec<_> = (self.num_published..).take(self.num_per_round).collect();
        let is_full = self.num_published >= self.num_resident;
        let num_free = (self.num_published + new.len()).saturating_sub(self.num_held);
        let num_free = num_free.min(new.len());
        let old =
            new.iter().map(|it| (it + self.num_prompts - 2 * self.num_held) % self.num_prompts);
        let old: Vec<_> = old.collect();
        let new: Vec<_> = new.iter().map(|it| it % self.num_prompts).collect();
        let num_blocks = (new.len() * num_prompt_blocks) as f64;
        for (name, side) in sides {
            let published = side.publish(&new);
            let freed = side.free(num_free);
            let mut times = [None, None, None, None, None];
            times[usize::from(is_full)] = Some(published);
            if is_full {
                times[2..].copy_from_slice(&[
                    Some(freed),
                    Some(side.look_up(&old)),
                    Some(side.admit(&old)),
                ]);
            }
            print_line(name, times.map(|time| time.map(|it| it / num_blocks)));
        }
        self.num_published += self.num_per_round;
    }
}

fn print_line(name: &str, times: [Option<f64>; 5]) {
    let times = times.map(|time| time.map_or("-".to_owned(), |time| format!("{time:.3}")));
    println!("{name}: {}", times.join(" "));
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [num_blocks, num_prompt_blocks, order] = arguments.as_slice() else {
        panic!("pass NUM_BLOCKS NUM_PROMPT_BLOCKS ordered|shuffled");
    };
    let shape = Shape {
        num_blocks: num_blocks.parse().unwrap(),
        num_prompt_blocks: num_prompt_blocks.parse().unwrap(),
        is_shuffled: order == "shuffled",
    };
    let mut floor = Floor::new(shape.num_blocks);
    let mut schedule = Schedule::new(&shape);
    let mut sides = sides::all(&shape, schedule.num_prompts);
    for line in io::stdin().lock().lines() {
        if line.unwrap() == "reset" {
            sides.iter_mut().for_each(|(_, side)| side.reset());
            schedule.num_published = 0;
        } else {
            schedule.round(&mut sides, shape.num_prompt_blocks);
            let [lookup, evict, clean, free, admit] = floor.round();
            let times = [clean, evict, free, lookup, admit];
            print_line("floor", times.map(|it| Some(it / NUM_ROUND_BLOCKS as f64)));
        }
        println!();
    }
}
