//! Stacks of open calls: one per greenlet of a thread, of which one is in use.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

/// A stack that is not in use.
struct Parked<F> {
    frames: Vec<F>,
    paused: i64,
    since: i64,
}

/// See the module. Dereferences to the stack in use.
pub struct OpenCallStacks<F> {
    current: Vec<F>,
    key: usize,
    /// Ticks for which the stack in use was not, to be subtracted from moments: time spent in other greenlets is not part
    /// of calls that are open in this one.
    pub paused: i64,
    parked: HashMap<usize, Parked<F>>,
}

impl<F> Deref for OpenCallStacks<F> {
    type Target = Vec<F>;

    #[inline(always)]
    fn deref(&self) -> &Vec<F> {
        &self.current
    }
}

impl<F> DerefMut for OpenCallStacks<F> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Vec<F> {
        &mut self.current
    }
}

impl<F> Default for OpenCallStacks<F> {
    fn default() -> OpenCallStacks<F> {
        OpenCallStacks {
            current: Vec::with_capacity(64),
            key: 0,
            paused: 0,
            parked: HashMap::new(),
        }
    }
}

impl<F> OpenCallStacks<F> {
    /// The greenlet whose stack is in use; 0: the thread's first one.
    pub fn key(&self) -> usize {
        self.key
    }

    /// Removes the innermost open call if more than `height` are open.
    pub fn pop_above(&mut self, height: usize) -> Option<F> {
        (self.current.len() > height).then(|| self.current.pop()).flatten()
    }

    /// Uses another stack from `now` on: the one with this key, or an empty one. Gives the ticks for which the stack that
    /// is in use now was not.
    pub fn switch(&mut self, to: usize, now: i64) -> i64 {
        if to == self.key {
            return 0;
        }
        let next = self.parked.remove(&to);
        let away = next.as_ref().map_or(0, |p| now.wrapping_sub(p.since));
        let (frames, paused) = match next {
            Some(parked) => (parked.frames, parked.paused.wrapping_add(away)),
            None => (Vec::new(), 0),
        };
        let frames = std::mem::replace(&mut self.current, frames);
        // An empty one holds nothing, and its greenlet may have ended: another one may get its address.
        if !frames.is_empty() {
            let paused = self.paused;
            let since = now;
            self.parked.insert(self.key, Parked { frames, paused, since });
        }
        (self.key, self.paused) = (to, paused);
        away
    }

    /// Open calls of all stacks.
    pub fn depth(&self) -> usize {
        self.current.len() + self.parked.values().map(|p| p.frames.len()).sum::<usize>()
    }

    /// A stack that is not in use and has open calls.
    pub fn any_parked(&self) -> Option<usize> {
        self.parked.keys().next().copied()
    }

    /// Open calls of all stacks, in no order.
    pub fn open(&self) -> impl Iterator<Item = &F> {
        let parked = self.parked.values().flat_map(|p| &p.frames);
        self.current.iter().chain(parked)
    }

    /// All stacks.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Vec<F>> {
        let parked = self.parked.values_mut().map(|p| &mut p.frames);
        std::iter::once(&mut self.current).chain(parked)
    }
}
