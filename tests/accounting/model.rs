//! The naive pool: a list for the queue, a scan for every lookup.

/// A block's hash name and group, and the time of its publication.
pub(crate) type Held = Option<(u16, u16, u64)>;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelPool {
    pub(crate) refs: Vec<u32>,
    pub(crate) pins: Vec<u32>,
    pub(crate) queue: Vec<u32>,
    pub(crate) held: Vec<Held>,
    pub(crate) clock: u64,
}

impl ModelPool {
    pub(crate) fn new(num_blocks: u32) -> Self {
        let n = num_blocks as usize;
        Self {
            refs: vec![0; n],
            pins: vec![0; n],
            queue: (1..num_blocks).collect(),
            held: vec![None; n],
            clock: 0,
        }
    }

    pub(crate) fn num_free(&self) -> usize {
        self.queue.iter().filter(|&&id| self.pins[id as usize] == 0).count()
    }

    pub(crate) fn num_cached(&self) -> usize {
        self.held.iter().flatten().count()
    }

    fn knows(&self, ids: &[u32]) -> bool {
        ids.iter().all(|&id| (id as usize) < self.refs.len())
    }

    pub(crate) fn allocate(&mut self, n: usize) -> Option<Vec<u32>> {
        if n > self.num_free() {
            return None;
        }
        let is_free = |id: &u32| self.pins[*id as usize] == 0;
        let allocated: Vec<u32> = self.queue.iter().copied().filter(is_free).take(n).collect();
        self.queue.retain(|id| !allocated.contains(id));
        for &id in &allocated {
            self.refs[id as usize] = 1;
            self.held[id as usize] = None;
        }
        Some(allocated)
    }

    pub(crate) fn touch(&mut self, ids: &[u32]) -> bool {
        let is_ok = self.knows(ids);
        for &id in ids.iter().filter(|&&id| is_ok && id != 0) {
            self.refs[id as usize] += 1;
            self.queue.retain(|&member| member != id);
        }
        is_ok
    }

    pub(crate) fn free(&mut self, ids: &[u32]) -> bool {
        let mut after = self.clone();
        let (mut clean, mut cached) = (Vec::new(), Vec::new());
        for &id in ids.iter().filter(|&&id| id != 0) {
            match after.refs.get_mut(id as usize) {
                Some(refs @ 1..) => *refs -= 1,
                _ => return false,
            }
        }
        for (at, &id) in ids.iter().enumerate().filter(|&(_, &id)| id != 0) {
            // The last occurrence of a repeated id decides its place.
            if after.refs[id as usize] == 0 && !ids[at + 1..].contains(&id) {
                if after.held[id as usize].is_some() { &mut cached } else { &mut clean }.push(id);
            }
        }
        clean.append(&mut after.queue);
        clean.append(&mut cached);
        after.queue = clean;
        *self = after;
        true
    }

    pub(crate) fn pin(&mut self, ids: &[u32]) -> bool {
        let is_ok = self.knows(ids);
        ids.iter().filter(|&&id| is_ok && id != 0).for_each(|&id| self.pins[id as usize] += 1);
        is_ok
    }

    pub(crate) fn unpin(&mut self, ids: &[u32]) -> bool {
        let mut pins = self.pins.clone();
        for &id in ids.iter().filter(|&&id| id != 0) {
            match pins.get_mut(id as usize) {
                Some(count @ 1..) => *count -= 1,
                _ => return false,
            }
        }
        self.pins = pins;
        true
    }

    pub(crate) fn cache(&mut self, ids: &[u32], names: &[u16], group: u16) -> bool {
        let mut after = self.clone();
        if ids.len() != names.len() {
            return false;
        }
        for (&id, &name) in ids.iter().zip(names) {
            if id == 0 || after.refs.get(id as usize).is_none_or(|&refs| refs == 0) {
                return false;
            }
            match after.held[id as usize] {
                Some((held, of, _)) if (held, of) == (name, group) => {}
                Some(_) => return false,
                None => {
                    after.clock += 1;
                    after.held[id as usize] = Some((name, group, after.clock));
                }
            }
        }
        *self = after;
        true
    }

    /// The oldest holder of a key.
    pub(crate) fn get(&self, name: u16, group: u16) -> Option<u32> {
        let holders = (0..).zip(&self.held).filter_map(|(id, held)| match held {
            Some((held, of, since)) if (*held, *of) == (name, group) => Some((*since, id)),
            _ => None,
        });
        holders.min().map(|(_, id)| id)
    }

    pub(crate) fn lookup(&self, names: &[u16], group: u16) -> Vec<u32> {
        names.iter().map_while(|&name| self.get(name, group)).collect()
    }

    pub(crate) fn evict(&mut self, ids: &[u32]) -> bool {
        let is_ok = self.knows(ids);
        ids.iter().filter(|_| is_ok).for_each(|&id| self.held[id as usize] = None);
        is_ok
    }

    pub(crate) fn reset(&mut self) -> bool {
        let is_idle = self.num_free() == self.refs.len() - 1;
        if is_idle {
            self.held.fill(None);
        }
        is_idle
    }
}
