//! Parents and children of slots: the prefix trees of a tier.
//!
//! ```text
//!   root <-- a <-- b        a slot's parent holds the block before it
//!             ^--- c        children of one slot are linked to one another
//!
//!   d awaits key k          the tier does not have the block before d: d is a root until k comes
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;

use super::slot_set::SlotSet;

type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// The slot of the block before; null for a root.
const PARENT: usize = 0;
/// The child that came last; null for a leaf.
const CHILD: usize = 1;
/// The neighbours among the children of one slot; null for an only child, and for a root.
const OLDER: usize = 2;
const NEWER: usize = 3;

/// What a root awaits.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    key: BlockKey,
    /// The root's place among those that await this key.
    place: usize,
}

/// Parents and children of slots, and the slots that await a parent. 16 bytes a slot.
#[derive(Clone, Debug)]
pub(super) struct Chains {
    /// Four neighbours of each slot, side by side because a slot that leaves needs them all. Only a
    /// vector of plain integers or arrays gets its zeros from the system without a write.
    links: Vec<[u32; 4]>,
    /// Roots whose parent is not in the tier, and its key.
    awaited: Map<BlockId, Awaited>,
    /// These roots by the key that they await.
    awaiting: Map<BlockKey, Vec<BlockId>>,
}

impl Chains {
    pub(super) const SLOT_BYTES: usize = 16;

    /// Chains of slots `1..num_blocks`, all of them roots without children.
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            links: vec![[0; 4]; num_blocks],
            awaited: HashMap::default(),
            awaiting: HashMap::default(),
        }
    }

    /// A slot's neighbours.
    #[inline]
    fn links(&self, slot: BlockId) -> [u32; 4] {
        #[cfg(test)]
        looks::count();
        self.links[slot.index()]
    }

    /// The slot above `slot`; null above a root.
    #[inline]
    pub(super) fn parent(&self, slot: BlockId) -> BlockId {
        BlockId(self.links(slot)[PARENT])
    }

    #[inline]
    pub(super) fn is_leaf(&self, slot: BlockId) -> bool {
        self.links(slot)[CHILD] == 0
    }

    /// The root above `slot`, or `slot` itself.
    pub(super) fn root(&self, slot: BlockId) -> BlockId {
        let mut at = slot;
        while !self.parent(at).is_null() {
            at = self.parent(at);
        }
        at
    }

    /// The roots above these slots, each once.
    pub(super) fn roots(&self, slots: &[BlockId]) -> Vec<BlockId> {
        let mut roots = Vec::new();
        if slots.is_empty() {
            return roots;
        }
        let mut visited = SlotSet::new(self.links.len());
        for &slot in slots {
            let mut at = slot;
            while visited.insert(at) {
                let parent = self.parent(at);
                if parent.is_null() {
                    roots.push(at);
                    break;
                }
                at = parent;
            }
        }
        roots
    }

    /// Makes a root a child of `parent`. It stays a root if that is null.
    #[inline]
    pub(super) fn attach(&mut self, slot: BlockId, parent: BlockId) {
        self.links[slot.index()][PARENT] = parent.0;
        if parent.is_null() {
            return;
        }
        let older = std::mem::replace(&mut self.links[parent.index()][CHILD], slot.0);
        if older != 0 {
            self.links[slot.index()][OLDER] = older;
            self.links[older as usize][NEWER] = slot.0;
        }
    }

    /// Whether any slot awaits its parent.
    #[inline]
    pub(super) fn has_awaited(&self) -> bool {
        !self.awaiting.is_empty()
    }

    /// Makes the slots that await `key` children of `slot`, which holds it from now on. Returns
    /// these former roots.
    #[inline]
    pub(super) fn adopt(&mut self, slot: BlockId, key: &BlockKey) -> Vec<BlockId> {
        if !self.has_awaited() {
            return Vec::new();
        }
        let mut adopted = self.awaiting.remove(key).unwrap_or_default();
        for child in &adopted {
            self.awaited.remove(child);
        }
        if adopted.is_empty() {
            return adopted;
        }
        // In a list that is no true chain, the slot may be below one of these, which are roots. The
        // two would be parents of each other.
        let root = self.root(slot);
        adopted.retain(|&child| child != root);
        for &child in &adopted {
            self.attach(child, slot);
        }
        adopted
    }

    /// Lets a root await its parent. Returns false if it awaits one already.
    pub(super) fn await_key(&mut self, root: BlockId, parent: BlockKey) -> bool {
        if self.awaited.contains_key(&root) {
            return false;
        }
        let roots = self.awaiting.entry(parent).or_default();
        self.awaited.insert(root, Awaited { key: parent, place: roots.len() });
        roots.push(root);
        true
    }

    /// The key that a root awaits.
    pub(super) fn awaited_by(&self, root: BlockId) -> Option<BlockKey> {
        self.awaited.get(&root).map(|awaited| awaited.key)
    }

    /// Removes a slot from its chain. Returns its parent.
    #[inline]
    pub(super) fn leave(&mut self, slot: BlockId) -> BlockId {
        let [parent, _, older, newer] = self.links(slot);
        if parent != 0 {
            self.links[slot.index()][PARENT] = 0;
            if newer == 0 {
                self.links[parent as usize][CHILD] = older;
            }
            if older | newer != 0 {
                self.close_gap(slot, older, newer);
            }
        }
        if !self.awaited.is_empty() {
            self.stop_awaiting(slot);
        }
        BlockId(parent)
    }

    /// Removes a slot from those that await a parent, if it is one of them.
    fn stop_awaiting(&mut self, slot: BlockId) {
        let Some(Awaited { key, place }) = self.awaited.remove(&slot) else { return };
        let Some(roots) = self.awaiting.get_mut(&key) else { return };
        roots.swap_remove(place);
        if let Some(moved) = roots.get(place).and_then(|moved| self.awaited.get_mut(moved)) {
            moved.place = place;
        }
        if roots.is_empty() {
            self.awaiting.remove(&key);
        }
    }

    /// Links the siblings on both sides of a child that leaves.
    #[cold]
    fn close_gap(&mut self, slot: BlockId, older: u32, newer: u32) {
        if older != 0 {
            self.links[older as usize][NEWER] = newer;
        }
        if newer != 0 {
            self.links[newer as usize][OLDER] = older;
        }
        self.links[slot.index()][OLDER] = 0;
        self.links[slot.index()][NEWER] = 0;
    }

    /// Makes the children of a slot that held `key` roots that await the key.
    pub(super) fn abandon(&mut self, slot: BlockId, key: BlockKey) {
        let mut child = BlockId(std::mem::take(&mut self.links[slot.index()][CHILD]));
        while !child.is_null() {
            let [_, below, older, _] = self.links(child);
            self.links[child.index()] = [0, below, 0, 0];
            self.await_key(child, key);
            child = BlockId(older);
        }
    }

    /// These slots and all their descendants, ascending.
    pub(super) fn below(&self, slots: &[BlockId]) -> Vec<BlockId> {
        let mut all = slots.to_vec();
        all.sort_unstable();
        all.dedup();
        let given = all.clone();
        let mut at = 0;
        while at < all.len() {
            let mut child = BlockId(self.links(all[at])[CHILD]);
            while !child.is_null() {
                if given.binary_search(&child).is_err() {
                    all.push(child);
                }
                child = BlockId(self.links(child)[OLDER]);
            }
            at += 1;
        }
        all.sort_unstable();
        all
    }

    /// Makes every slot a root without children.
    pub(super) fn clear(&mut self) {
        self.links.fill([0; 4]);
        self.awaited.clear();
        self.awaiting.clear();
    }

    /// The slots that await a parent and its key, ascending.
    pub(super) fn awaited(&self) -> Vec<(BlockId, BlockKey)> {
        let mut awaited: Vec<_> =
            self.awaited.iter().map(|(&slot, awaited)| (slot, awaited.key)).collect();
        awaited.sort_unstable();
        awaited
    }

    /// Whether a slot is its own ancestor.
    pub(super) fn has_loop(&self) -> bool {
        let mut is_done = vec![false; self.links.len()];
        let mut is_on_path = vec![false; self.links.len()];
        is_done[0] = true;
        let mut path = Vec::new();
        for slot in 1..self.links.len() {
            let mut at = slot;
            while !is_done[at] {
                if std::mem::replace(&mut is_on_path[at], true) {
                    return true;
                }
                path.push(at);
                at = self.links[at][PARENT] as usize;
            }
            path.drain(..).for_each(|at| is_done[at] = true);
        }
        false
    }

    /// Verifies that links agree, and that only kept slots have any.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first invariant that does not hold.
    pub(super) fn check(
        &self,
        is_kept: impl Fn(BlockId) -> bool,
        holds: impl Fn(&BlockKey) -> bool,
    ) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("chains: {what}")));
        let mut num_children = 0;
        for slot in (1..).map(BlockId).take(self.links.len() - 1) {
            let parent = self.parent(slot);
            if !(parent.is_null() || is_kept(slot) && is_kept(parent)) {
                return broken(format!("slot {slot} or its parent {parent} is empty"));
            }
            num_children = usize::wrapping_add(num_children, (!parent.is_null()).into());
            let [_, first, older, newer] = self.links(slot);
            if parent.is_null() && (older, newer) != (0, 0) {
                return broken(format!("root {slot} has siblings"));
            }
            let (mut newer, mut child) = (0, first);
            while child != 0 {
                let at = child as usize;
                if self.links[at][PARENT] != slot.0 || self.links[at][NEWER] != newer {
                    return broken(format!(
                        "slot {child} is not a child of {slot}, or out of order"
                    ));
                }
                num_children = num_children.wrapping_sub(1);
                (newer, child) = (child, self.links[at][OLDER]);
            }
        }
        if num_children != 0 {
            return broken("children are miscounted".to_owned());
        }
        let num_awaiting: usize = self.awaiting.values().map(Vec::len).sum();
        for (slot, Awaited { key: parent, place }) in &self.awaited {
            let slots = self.awaiting.get(parent);
            let is_listed = slots.is_some_and(|slots| slots.get(*place) == Some(slot));
            if !is_kept(*slot) || !is_listed || !self.parent(*slot).is_null() {
                return broken(format!(
                    "slot {slot} is listed wrongly among those that await a parent"
                ));
            }
            if holds(parent) {
                return broken(format!("slot {slot} awaits a parent that the tier has"));
            }
        }
        if num_awaiting != self.awaited.len() {
            return broken("slots that await their parents are miscounted".to_owned());
        }
        Ok(())
    }
}

/// Number of looks at slots on this thread, for tests.
#[cfg(test)]
pub(in crate::offload) mod looks {
    use std::cell::Cell;

    thread_local!(static NUM_LOOKS: Cell<usize> = const { Cell::new(0) });

    pub(in crate::offload) fn count() {
        NUM_LOOKS.set(NUM_LOOKS.get() + 1);
    }

    /// The looks since the last call.
    pub(in crate::offload) fn take() -> usize {
        NUM_LOOKS.take()
    }
}
