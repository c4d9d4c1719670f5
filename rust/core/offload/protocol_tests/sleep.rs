//! A device that sleeps: its blocks go into an image on the host, and come back.

use crate::ledger::{AllocateArgs, BlockLedger, Context};
use crate::offload::Job;

use super::explorer::World as _;
use super::memory::{Content, Memory, Place};
use super::world::{BLOCK_SIZE, NUM_BLOCKS, Phase, World, groups, hashes};

impl World {
    /// Copies every block to the host, each request's partial last one included.
    pub(super) fn sleep(&mut self) -> Result<(), String> {
        let mut ledger = BlockLedger::new(20, groups(), None, false).unwrap();
        let mut contents = vec![Content::TORN];
        for who in 0..self.requests.len() {
            let Some(request) = self.requests[who].as_ref().filter(|it| !it.table.is_empty())
            else {
                continue;
            };
            let num_tokens =
                request.table.len() * BLOCK_SIZE + usize::from(request.table.len() == NUM_BLOCKS);
            ledger.add(&who.to_string(), &hashes(who), Context::default()).unwrap();
            let args = AllocateArgs { num_new_tokens: num_tokens, ..AllocateArgs::default() };
            ledger.allocate(&who.to_string(), &args).unwrap();
            for (at, block) in ledger.block_table(&who.to_string(), 0).unwrap().iter().enumerate() {
                let content = request
                    .table
                    .get(at)
                    .map_or(Content::tail(who), |block| self.device[0][block.index()]);
                contents.resize(contents.len().max(block.index() + 1), Content::TORN);
                contents[block.index()] = content;
            }
        }
        let before = self.project();
        let Ok(missing) = self.scheduler.hold_image(&ledger) else {
            return if self.project() == before {
                Ok(())
            } else {
                Err("a refused image has changed something".to_owned())
            };
        };
        self.check_targets(&missing.host_slots, Memory::Host)?;
        for (block, &place) in missing.block_ids.iter().zip(&missing.host_slots) {
            self.write(Place(Memory::Host, place as usize), contents[block.index()]);
        }
        let Job { block_ids, host_slots, .. } = self.scheduler.image().unwrap();
        let places = host_slots.iter().map(|&place| place as usize);
        self.image =
            Some(places.zip(block_ids.iter().map(|block| contents[block.index()])).collect());
        for request in self.requests.iter_mut().flatten() {
            if matches!(request.phase, Phase::Holding(_)) {
                request.phase = Phase::Asking;
            }
        }
        Ok(())
    }

    pub(super) fn wake(&mut self) -> Result<(), String> {
        let image = self.image.take().unwrap();
        for &(place, content) in &image {
            let is_sound = |held: Content| held == content || held == Content::DAMAGED;
            if !self.host.iter().all(|host| is_sound(host[place])) {
                return Err(format!("the image has another block in place {place}"));
            }
        }
        self.scheduler.image().unwrap();
        self.scheduler.release_image().unwrap();
        Ok(())
    }
}
