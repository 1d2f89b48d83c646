//! Stacks by line: each entry is a line of a function on a particular stack.
//!
//! Where a profile knows the lines of its samples ([`Profile::places`]) they are exact, of callers too. For other
//! samples the nodes have only how often each line was seen: a frame has a line here only if all samples of its node
//! were at that line.

use rustc_hash::FxHashMap;

use crate::model::{NO_PLACE, Profile};
use crate::view::View;

/// No entry, no place.
pub const NONE: u32 = u32::MAX;

/// A line of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineEntry {
    /// The caller's entry; always a lower index, but for the first one, which is the root.
    pub parent: u32,
    /// In the view.
    pub item: u32,
    /// 0: unknown.
    pub line: u32,
}

/// All stacks of a profile by line, with their threads.
pub struct StacksByLine {
    /// The entries, callers first; the first one is the root.
    pub all: Vec<LineEntry>,
    /// By index in the timeline, the entry where the sample ended, or [`NONE`]: such a sample is not in the tree.
    pub of_sample: Vec<u32>,
    /// Samples that are not in the timeline: innermost entry, and self amounts by value type.
    pub rest: Vec<(u32, Vec<u64>)>,
    /// Whether all samples are in the timeline, with known lines.
    pub is_exact: bool,
}

struct EntryBuilder<'a, 'p> {
    view: &'a View<'p>,
    all: Vec<LineEntry>,
    known: FxHashMap<LineEntry, u32>,
    /// By item, the entry that represents all its lines.
    plain: Vec<u32>,
}

impl std::hash::Hash for LineEntry {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.parent, self.item, self.line).hash(state);
    }
}

impl EntryBuilder<'_, '_> {
    fn entry(&mut self, entry: LineEntry) -> u32 {
        let all = &mut self.all;
        *self.known.entry(entry).or_insert_with(|| {
            all.push(entry);
            all.len() as u32 - 1
        })
    }

    /// The entry of an item as a caller, or at the end of a stack, without knowing more than the tree does.
    fn plain(&mut self, item: u32) -> u32 {
        let mut missing = Vec::new();
        let mut at = item;
        while self.plain[at as usize] == NONE {
            missing.push(at);
            at = self.view.items[at as usize].parent;
        }
        let mut parent = self.plain[at as usize];
        for item in missing.into_iter().rev() {
            let data = &self.view.items[item as usize];
            let only = data
                .lines
                .iter()
                .next()
                .filter(|(_, n)| data.lines.len() == 1 && **n >= data.count);
            let line = only.map_or(0, |(line, _)| *line);
            parent = self.entry(LineEntry { parent, item, line });
            self.plain[item as usize] = parent;
        }
        parent
    }

    /// As [`EntryBuilder::plain`], at a line (0: unknown).
    fn end(&mut self, item: u32, line: u32) -> u32 {
        let plain = self.plain(item);
        match line {
            0 => plain,
            line => self.entry(LineEntry {
                line,
                ..self.all[plain as usize]
            }),
        }
    }
}

impl StacksByLine {
    /// The stacks of a profile. If the timeline has more samples than the counts of the tree, the first ones are used.
    pub fn new(profile: &Profile, view: &View<'_>) -> StacksByLine {
        let mut builder = EntryBuilder {
            view,
            all: vec![LineEntry {
                parent: 0,
                item: 0,
                line: 0,
            }],
            known: FxHashMap::default(),
            plain: vec![NONE; view.items.len()],
        };
        builder.plain[0] = 0;
        let of_place = of_places(profile, view, &mut builder);
        let values = profile.value_types().len();
        let mut left: Vec<Vec<u64>> = (0..values).map(|value| view.self_amounts(profile, value)).collect();
        // By item and line, samples of which this is known.
        let mut lines_left: FxHashMap<u32, Vec<(u32, u64)>> = FxHashMap::default();
        let mut is_exact = true;
        let mut of_sample = Vec::with_capacity(profile.timeline.len());
        for (at, sample) in profile.timeline.iter().enumerate() {
            let count = profile.sample_amount(0, at);
            let item = view
                .item_of(sample.node)
                .filter(|item| left[0][*item as usize] >= count);
            let Some(item) = item else {
                of_sample.push(NONE);
                is_exact = false;
                continue;
            };
            for (value, left) in left.iter_mut().enumerate() {
                let left = &mut left[item as usize];
                *left = left.saturating_sub(profile.sample_amount(value, at));
            }
            let data = &view.items[item as usize];
            let place = profile.sample_places.get(at).copied().unwrap_or(NO_PLACE);
            let entry = of_place.get(place as usize).copied().unwrap_or(NONE);
            let entry = match builder.all.get(entry as usize).filter(|found| found.item == item) {
                Some(_) => entry,
                None => {
                    is_exact = false;
                    let only = data.self_lines.keys().next().filter(|_| data.self_lines.len() == 1);
                    builder.end(item, only.copied().unwrap_or(0))
                }
            };
            let line = builder.all[entry as usize].line;
            if line > 0 && data.self_lines.len() > 1 {
                let lines = lines_left
                    .entry(item)
                    .or_insert_with(|| data.self_lines.iter().map(|(line, count)| (*line, *count)).collect());
                if let Some((_, left)) = lines.iter_mut().find(|(known, _)| *known == line) {
                    *left = left.saturating_sub(count);
                }
            }
            of_sample.push(entry);
        }
        let plain_counts = profile.value_types().iter().all(|value| value.is_per_count());
        let mut rest = Vec::new();
        for item in 0..view.items.len() as u32 {
            let mut amounts: Vec<u64> = left.iter().map(|left| left[item as usize]).collect();
            if amounts.iter().all(|amount| *amount == 0) {
                continue;
            }
            is_exact = false;
            let data = &view.items[item as usize];
            let lines = lines_left.remove(&item);
            let lines = lines.unwrap_or_else(|| data.self_lines.iter().map(|(line, count)| (*line, *count)).collect());
            // The distribution of amounts that are not per count over several lines is unknown.
            if plain_counts || lines.len() == 1 && lines[0].1 >= amounts[0] {
                for (line, count) in lines {
                    let count = count.min(amounts[0]);
                    if count == 0 {
                        continue;
                    }
                    let part: Vec<u64> = if count == amounts[0] {
                        amounts.clone()
                    } else {
                        amounts.iter().map(|amount| amount / amounts[0] * count).collect()
                    };
                    amounts.iter_mut().zip(&part).for_each(|(all, part)| *all -= part);
                    rest.push((builder.end(item, line), part));
                }
            }
            if amounts.iter().any(|amount| *amount > 0) {
                rest.push((builder.plain(item), amounts));
            }
        }
        StacksByLine {
            all: builder.all,
            of_sample,
            rest,
            is_exact,
        }
    }

    /// Self amount of a value by entry.
    pub fn self_amounts(&self, profile: &Profile, value: usize) -> Vec<u64> {
        let mut self_counts = vec![0u64; self.all.len()];
        let samples = self.of_sample.iter().enumerate();
        let timed = samples.map(|(at, entry)| (*entry, profile.sample_amount(value, at)));
        let rest = self.rest.iter().map(|(entry, amounts)| (*entry, amounts[value]));
        for (entry, amount) in timed.chain(rest) {
            if let Some(self_count) = self_counts.get_mut(entry as usize) {
                *self_count = self_count.saturating_add(amount);
            }
        }
        self_counts
    }
}

/// The entry of each place of the profile, [`NONE`] for those that are inconsistent with its tree.
fn of_places(profile: &Profile, view: &View<'_>, builder: &mut EntryBuilder<'_, '_>) -> Vec<u32> {
    let mut of_place: Vec<u32> = Vec::with_capacity(profile.places.len());
    for (at, place) in profile.places.iter().enumerate() {
        let parent = of_place
            .get(place.parent as usize)
            .copied()
            .filter(|parent| *parent != NONE);
        let fits = |parent: &u32, item: &u32| view.items[*item as usize].parent == builder.all[*parent as usize].item;
        let entry = match (at, parent, view.item_of(place.node)) {
            (0, ..) => 0,
            (_, Some(parent), Some(item)) if item > 0 && fits(&parent, &item) => {
                let line = place.line;
                builder.entry(LineEntry { parent, item, line })
            }
            _ => NONE,
        };
        of_place.push(entry);
    }
    of_place
}
