//! A part of the rows of JSON output, and where the next part begins.

use serde_json::{Value, json};

/// Which rows are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Rows at most; `None`: all.
    pub limit: Option<usize>,
    /// Rows before the first one.
    pub skipped: usize,
}

/// What was printed of all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    pub total: usize,
    pub shown: usize,
    /// Rows up to the last one that was printed; `None`: it was the last one of all.
    next: Option<usize>,
}

impl Page {
    /// Keeps the rows of this page.
    pub fn cut<T>(&self, rows: &mut Vec<T>) -> Shown {
        let mut at = 0;
        rows.retain(|_| {
            at += 1;
            self.has(at - 1)
        });
        self.shown(at)
    }

    /// The same of a list in JSON: the rows are its elements. With `inner`, these have rows of their own in a list of that
    /// name, and one without any counts as a row. Of an object, the rows are those of its lists.
    pub fn cut_json(&self, list: &mut Value, inner: Option<&str>) -> Shown {
        let mut at = 0;
        let mut keep = |rows: &mut Vec<Value>| {
            rows.retain(|_| {
                at += 1;
                self.has(at - 1)
            });
        };
        match (list, inner) {
            (Value::Object(lists), _) => lists.values_mut().filter_map(Value::as_array_mut).for_each(keep),
            (Value::Array(groups), Some(inner)) => groups.retain_mut(|group| {
                match group
                    .get_mut(inner)
                    .and_then(Value::as_array_mut)
                    .filter(|rows| !rows.is_empty())
                {
                    Some(rows) => {
                        keep(rows);
                        !rows.is_empty()
                    }
                    None => {
                        let mut one = vec![Value::Null];
                        keep(&mut one);
                        !one.is_empty()
                    }
                }
            }),
            (Value::Array(rows), None) => keep(rows),
            _ => {}
        }
        self.shown(at)
    }

    fn has(&self, at: usize) -> bool {
        at >= self.skipped && self.limit.is_none_or(|limit| at - self.skipped < limit)
    }

    fn shown(&self, total: usize) -> Shown {
        let left = total.saturating_sub(self.skipped);
        let shown = self.limit.map_or(left, |limit| limit.min(left));
        let next = (shown > 0 && shown < left).then_some(self.skipped + shown);
        Shown { total, shown, next }
    }
}

impl Shown {
    /// The object `output` with `total_rows`, `shown`, `next_cursor` (null where no more follow) and, last, the printed rows.
    pub fn with_rows(self, mut output: Value, key: &str, rows: Value) -> Value {
        if let Value::Object(output) = &mut output {
            output.insert("total_rows".into(), self.total.into());
            output.insert("shown".into(), self.shown.into());
            output.insert("next_cursor".into(), json!(self.next.map(|next| next.to_string())));
            output.insert(key.into(), rows);
        }
        output
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(skipped: usize, limit: Option<usize>) -> Page {
        Page { limit, skipped }
    }

    #[test]
    fn pages_have_all_rows_once() {
        for rows in 0..7 {
            for limit in 1..9 {
                let (mut seen, mut skipped) = (Vec::new(), 0);
                loop {
                    let mut list: Vec<usize> = (0..rows).collect();
                    let shown = page(skipped, Some(limit)).cut(&mut list);
                    assert_eq!((shown.total, shown.shown), (rows, list.len()));
                    seen.extend(list);
                    match shown.next {
                        Some(next) => skipped = next,
                        None => break,
                    }
                }
                assert_eq!(seen, (0..rows).collect::<Vec<_>>());
            }
        }
        for (page, shown, next) in [
            (page(0, None), 3, None),
            (page(1, None), 2, None),
            (page(9, Some(1)), 0, None),
            (page(0, Some(0)), 0, None),
            (page(usize::MAX, Some(usize::MAX)), 0, None),
        ] {
            let done = page.cut(&mut vec!['a', 'b', 'c']);
            assert_eq!((done.shown, done.next), (shown, next), "{page:?}");
        }
    }

    #[test]
    fn rows_of_groups_are_counted_one_by_one() {
        let groups = json!([{"name": "f", "calls": [1, 2]}, {"name": "g", "calls": []}, {"name": "h", "calls": [3]}]);
        for (page, expected, next) in [
            (page(0, None), groups.clone(), None),
            (page(0, Some(1)), json!([{"name": "f", "calls": [1]}]), Some(1)),
            (
                page(1, Some(2)),
                json!([{"name": "f", "calls": [2]}, {"name": "g", "calls": []}]),
                Some(3),
            ),
            (page(3, Some(2)), json!([{"name": "h", "calls": [3]}]), None),
        ] {
            let mut list = groups.clone();
            let shown = page.cut_json(&mut list, Some("calls"));
            assert_eq!((list, shown.total, shown.next), (expected, 4, next), "{page:?}");
        }
        let mut lists = json!({"sites": [1, 2], "threads": [3], "pairs": []});
        let shown = page(1, Some(1)).cut_json(&mut lists, None);
        assert_eq!(
            (lists, shown.total),
            (json!({"sites": [2], "threads": [], "pairs": []}), 3)
        );
    }
}
