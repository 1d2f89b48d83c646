//! Labels of samples: what the spans of a program say of them, as pairs of key and value.

use std::collections::HashMap;

use super::model::{Frame, FrameId, FrameKind, Node, NodeId, Profile};
use super::sums::sum_upwards;
use super::values::Value;

/// The labels of one sample, those of the outermost span first. The names of nested spans have the same key.
pub type LabelSet = Vec<(String, String)>;

/// Number of a set in [`Labels::sets`].
pub type LabelSetId = u32;

/// Labels of the samples of a timeline. Empty for a profile without any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// Each set once; the first one is empty.
    pub sets: Vec<LabelSet>,
    /// By index in the timeline.
    pub of_samples: Vec<LabelSetId>,
}

impl Labels {
    /// Of samples whose sets are numbered as in `sets`; nothing if all are the empty one.
    pub fn new(sets: &[LabelSet], of_samples: Vec<LabelSetId>) -> Labels {
        if of_samples.iter().all(|set| *set == 0) {
            Labels::default()
        } else {
            Labels {
                sets: sets.to_vec(),
                of_samples,
            }
        }
    }

    /// Whether no sample has labels.
    pub fn is_empty(&self) -> bool {
        self.of_samples.is_empty()
    }

    /// The labels of a sample of the timeline.
    pub fn of(&self, sample: usize) -> &[(String, String)] {
        let set = self.of_samples.get(sample).and_then(|set| self.sets.get(*set as usize));
        set.map_or(&[], |set| set)
    }

    /// Those of some samples of several profiles, given as (profile, index in its timeline).
    pub fn merge(all: &[&Labels], rows: &[(usize, usize)]) -> Labels {
        if all.iter().all(|labels| labels.is_empty()) {
            return Labels::default();
        }
        let mut sets = LabelSets::default();
        let of_samples = rows.iter().map(|(from, at)| match all.get(*from) {
            Some(labels) => sets.id(labels.of(*at)),
            None => 0,
        });
        let of_samples = of_samples.collect();
        Labels::new(&sets.all, of_samples)
    }
}

/// Sets of labels, each once.
pub struct LabelSets {
    /// The sets by their number.
    pub all: Vec<LabelSet>,
    /// Labels come from the target: a hasher that resists collision attacks.
    ids: HashMap<LabelSet, LabelSetId>,
}

impl Default for LabelSets {
    fn default() -> LabelSets {
        LabelSets {
            all: vec![Vec::new()],
            ids: HashMap::from([(Vec::new(), 0)]),
        }
    }
}

impl LabelSets {
    /// The number of a set that has one.
    pub fn known(&self, set: &[(String, String)]) -> Option<LabelSetId> {
        self.ids.get(set).copied()
    }

    /// The number of a set.
    pub fn id(&mut self, set: &[(String, String)]) -> LabelSetId {
        if let Some(id) = self.known(set) {
            return id;
        }
        let id = self.all.len() as LabelSetId;
        self.all.push(set.to_vec());
        self.ids.insert(set.to_vec(), id);
        id
    }
}

/// A label that samples are to have: `span=NAME`, or one of another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelFilter {
    /// The key that a label must have.
    pub key: String,
    /// The value that a label must have.
    pub value: String,
}

impl LabelFilter {
    /// Whether a sample with these labels has it.
    pub fn matches(&self, labels: &[(String, String)]) -> bool {
        labels
            .iter()
            .any(|(key, value)| *key == self.key && *value == self.value)
    }
}

/// A row of a table by label: a label, and what the samples with it amount to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelRow {
    /// `None`: samples without labels.
    pub label: Option<(String, String)>,
    /// Of samples for which it is the innermost span, or that have it, if it is no name of a span.
    pub self_count: u64,
    /// Of all samples with it.
    pub total: u64,
}

/// The key of the names of spans.
pub const SPAN: &str = "span";

impl Profile {
    /// A profile with the counts of this one in which labels are the functions: the stack of a sample are its labels, and samples
    /// without any are at the root. Names of spans stand for themselves.
    pub fn of_labels(&self) -> Profile {
        let mut out = Profile {
            meta: self.meta.clone(),
            frames: vec![Frame::new(FrameKind::Root, "root")],
            nodes: vec![Node::new(0, 0)],
            ..Profile::default()
        };
        let (count, others) = (Value::per_count(self.count_type().clone(), 1), &self.value_types()[1..]);
        // Of weighted samples, other amounts do not follow from the count.
        let others = others.iter().filter(|value| value.is_per_count()).cloned();
        out.values = std::iter::once(count).chain(others).collect();
        // Labels come from the target: use hashers that resist collision attacks.
        let mut frames: HashMap<&(String, String), FrameId> = HashMap::new();
        let mut children: HashMap<(NodeId, FrameId), NodeId> = HashMap::new();
        let mut of_sets = Vec::with_capacity(self.labels.sets.len());
        for set in &self.labels.sets {
            let mut at = 0;
            for label in set {
                let frame = *frames.entry(label).or_insert_with(|| {
                    let (key, value) = label;
                    let mut frame = match key.as_str() {
                        SPAN => Frame::new(FrameKind::State, value.clone()),
                        _ => Frame::new(FrameKind::State, format!("{key}={value}")),
                    };
                    // A span may be called like another label.
                    frame.address = u64::from(key != SPAN);
                    out.frames.push(frame);
                    out.frames.len() as FrameId - 1
                });
                at = *children.entry((at, frame)).or_insert_with(|| {
                    out.nodes.push(Node::new(frame, at));
                    out.nodes.len() as NodeId - 1
                });
            }
            of_sets.push(at);
        }
        let mut counts = vec![0u64; out.nodes.len()];
        let mut timed = 0u64;
        for sample in 0..self.timeline.len() {
            let set = self.labels.of_samples.get(sample).map_or(0, |set| *set as usize);
            let amount = self.sample_amount(0, sample);
            timed = timed.saturating_add(amount);
            if let Some(count) = of_sets.get(set).and_then(|node| counts.get_mut(*node as usize)) {
                *count = count.saturating_add(amount);
            }
        }
        // What the timeline does not have is without labels.
        counts[0] = counts[0].saturating_add(self.total_amount(0).saturating_sub(timed));
        sum_upwards(&mut counts, |at| Some(out.nodes[at].parent as usize));
        out.nodes
            .iter_mut()
            .zip(counts)
            .for_each(|(node, count)| node.count = count);
        out
    }

    /// Samples by label, in a value of the profile: spans first, then other keys by name, each with most samples first; the row
    /// without a label last.
    pub fn by_label(&self, value: usize) -> Vec<LabelRow> {
        let mut of_sets = vec![0u64; self.labels.sets.len().max(1)];
        for sample in 0..self.timeline.len() {
            let set = self.labels.of_samples.get(sample).map_or(0, |set| *set as usize);
            if let Some(sum) = of_sets.get_mut(set) {
                *sum = sum.saturating_add(self.sample_amount(value, sample));
            }
        }
        // Labels come from the target: use a hasher that resists collision attacks.
        let mut rows: HashMap<&(String, String), (u64, u64)> = HashMap::new();
        for (set, amount) in self.labels.sets.iter().zip(&of_sets) {
            let innermost = set.iter().rposition(|(key, _)| key == SPAN);
            for (at, label) in set.iter().enumerate() {
                let row = rows.entry(label).or_default();
                if label.0 != SPAN || innermost == Some(at) {
                    row.0 = row.0.saturating_add(*amount);
                }
                // A span within one of the same name.
                if !set[..at].contains(label) {
                    row.1 = row.1.saturating_add(*amount);
                }
            }
        }
        let mut rows: Vec<LabelRow> = rows
            .into_iter()
            .map(|(label, (self_count, total))| LabelRow {
                label: Some(label.clone()),
                self_count,
                total,
            })
            .collect();
        rows.sort_by(|a, b| {
            let key = |row: &LabelRow| row.label.as_ref().map(|(key, _)| (key != SPAN, key.clone()));
            let value = |row: &LabelRow| row.label.as_ref().map(|(_, value)| value.clone());
            (key(a), b.total, b.self_count, value(a)).cmp(&(key(b), a.total, a.self_count, value(b)))
        });
        rows.push(LabelRow {
            label: None,
            self_count: of_sets[0],
            total: of_sets[0],
        });
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::TimelineSample;
    use super::*;

    fn set(labels: &[(&str, &str)]) -> LabelSet {
        labels.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    #[test]
    fn sets_are_merged() {
        let (a, b) = (set(&[("span", "a")]), set(&[("span", "b")]));
        let first = Labels::new(&[vec![], a.clone()], vec![1, 0, 1]);
        let second = Labels::new(&[vec![], b.clone(), a.clone()], vec![2, 1]);
        let both = Labels::merge(&[&first, &second], &[(0, 0), (1, 1), (1, 0), (0, 1)]);
        assert_eq!(both.sets, [vec![], a.clone(), b]);
        assert_eq!(both.of_samples, [1, 2, 1, 0]);
        assert_eq!((both.of(0), both.of(3), both.of(9)), (&*a, &[][..], &[][..]));
        assert!(Labels::merge(&[&first], &[(0, 1)]).is_empty());
        assert!(Labels::new(&[vec![]], vec![0, 0]).is_empty());
    }

    #[test]
    fn rows_of_nested_spans_have_own_and_all_samples() {
        let outer = set(&[("span", "outer"), ("user", "7")]);
        let inner = set(&[("span", "outer"), ("user", "7"), ("span", "inner")]);
        let within = set(&[("span", "inner"), ("span", "inner")]);
        let sample = TimelineSample {
            time: 0,
            pid: 1,
            tid: 1,
            node: 0,
        };
        let profile = Profile {
            timeline: vec![sample; 6],
            labels: Labels::new(&[vec![], outer, inner, within], vec![1, 2, 2, 0, 3, 2]),
            ..Profile::default()
        };
        let rows = profile.by_label(0);
        let rows: Vec<_> = rows
            .iter()
            .map(|row| (row.label.as_ref().map(|(k, v)| (&**k, &**v)), row.self_count, row.total))
            .collect();
        assert_eq!(
            rows,
            [
                (Some(("span", "inner")), 4, 4),
                (Some(("span", "outer")), 1, 4),
                (Some(("user", "7")), 4, 4),
                (None, 1, 1),
            ]
        );
    }
}
