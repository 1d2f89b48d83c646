//! Whole trees: `merge`, `get_profile` and `plot_data` of `distributed.profile`.
//!
//! Explicit stacks replace recursion, because a tree may be deeper than the machine's stack, or than Python's
//! limit, at which the original leaves subtrees out.

use std::cell::LazyCell;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyFloat, PyInt, PyList, PySet, PyString, PyTuple};

use crate::count::item;

type Any<'py> = Bound<'py, PyAny>;

/// Keys and values, in order. Taken as a whole first: no code of others runs while a dictionary is gone through.
fn items<'py>(mapping: &Any<'py>) -> PyResult<Vec<(Any<'py>, Any<'py>)>> {
    match mapping.cast_exact::<PyDict>() {
        Ok(dict) => Ok(dict.iter().collect()),
        Err(_) => mapping
            .try_iter()?
            .map(|key| {
                let key = key?;
                let value = mapping.get_item(&key)?;
                Ok((key, value))
            })
            .collect(),
    }
}

/// Sum of the counts, whatever `sum` makes of them.
fn sum<'py>(nodes: &[Any<'py>]) -> PyResult<Any<'py>> {
    let py = nodes[0].py();
    let key = intern!(py, "count");
    let mut quick = Some(0i64);
    let mut counts = Vec::with_capacity(nodes.len());
    for node in nodes {
        let count = item(node, key)?;
        quick = quick
            .filter(|_| count.is_exact_instance_of::<PyInt>())
            .and_then(|sum| sum.checked_add(count.extract().ok()?));
        counts.push(count);
    }
    if let Some(sum) = quick {
        return Ok(sum.into_pyobject(py)?.into_any());
    }
    // Not one after the other: Python adds fractions more exactly than that (from 3.12 on, Python/bltinmodule.c).
    let sum = py.import(intern!(py, "builtins"))?.getattr(intern!(py, "sum"))?;
    sum.call1((PyList::new(py, counts)?,))
}

/// Refuses nodes of different functions.
fn check_same<'py>(nodes: &[Any<'py>]) -> PyResult<Any<'py>> {
    let py = nodes[0].py();
    let key = intern!(py, "identifier");
    let first = item(&nodes[0], key)?;
    for node in &nodes[1..] {
        let other = item(node, key)?;
        if !other.is(&first) && !other.eq(&first)? {
            let all = PySet::empty(py)?;
            for node in nodes {
                all.add(item(node, key)?)?;
            }
            return Err(PyValueError::new_err(format!(
                "Expected identifiers, got {}",
                all.repr()?
            )));
        }
    }
    Ok(first)
}

/// The merged node of some nodes, with its children still to be put into the dictionary that comes with it.
fn head<'py>(nodes: &[Any<'py>]) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>)> {
    let py = nodes[0].py();
    let identifier = check_same(nodes)?;
    let (node, children) = (PyDict::new(py), PyDict::new(py));
    node.set_item(intern!(py, "description"), item(&nodes[0], intern!(py, "description"))?)?;
    node.set_item(intern!(py, "children"), &children)?;
    node.set_item(intern!(py, "count"), sum(nodes)?)?;
    node.set_item(intern!(py, "identifier"), identifier)?;
    Ok((node, children))
}

/// Nodes that become one, and the dictionary that takes it under this key.
struct MergedNode<'py> {
    nodes: Vec<Any<'py>>,
    place: Bound<'py, PyDict>,
    key: Any<'py>,
}

/// Children of all nodes, those with one key together, in order of first sight.
fn group<'py>(nodes: &[Any<'py>], place: &Bound<'py, PyDict>) -> PyResult<Vec<MergedNode<'py>>> {
    let py = place.py();
    let key = intern!(py, "children");
    let mut tasks: Vec<MergedNode<'py>> = Vec::new();
    let task = |key, node| MergedNode {
        nodes: vec![node],
        place: place.clone(),
        key,
    };
    if let [node] = nodes {
        return Ok(items(&item(node, key)?)?
            .into_iter()
            .map(|(key, child)| task(key, child))
            .collect());
    }
    let seen = PyDict::new(py);
    for (at, node) in nodes.iter().enumerate() {
        let children = item(node, key)?;
        for (place, (key, child)) in items(&children)?.into_iter().enumerate() {
            // Trees of one program have their children in one order mostly.
            if at > 0
                && let Some(likely) = tasks.get_mut(place)
                && likely.key.is(&key)
            {
                likely.nodes.push(child);
                continue;
            }
            match seen.get_item(&key)? {
                Some(found) => tasks[found.extract::<usize>()?].nodes.push(child),
                None => {
                    seen.set_item(&key, tasks.len())?;
                    tasks.push(task(key, child));
                }
            }
        }
    }
    Ok(tasks)
}

fn merged<'py>(nodes: &[Any<'py>]) -> PyResult<Any<'py>> {
    let (root, children) = head(nodes)?;
    let mut work = group(nodes, &children)?;
    work.reverse();
    while let Some(task) = work.pop() {
        let (node, children) = head(&task.nodes)?;
        task.place.set_item(&task.key, node)?;
        let from = work.len();
        work.extend(group(&task.nodes, &children)?);
        work[from..].reverse();
    }
    Ok(root.into_any())
}

/// An empty tree.
#[pyfunction]
pub fn create(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let description = PyDict::new(py);
    for (key, value) in [("filename", ""), ("name", "")] {
        description.set_item(key, value)?;
    }
    description.set_item(intern!(py, "line_number"), 0)?;
    description.set_item(intern!(py, "line"), "")?;
    let root = PyDict::new(py);
    root.set_item(intern!(py, "count"), 0)?;
    root.set_item(intern!(py, "children"), PyDict::new(py))?;
    root.set_item(intern!(py, "identifier"), intern!(py, "root"))?;
    root.set_item(intern!(py, "description"), description)?;
    Ok(root)
}

/// One tree of many: counts are added, children with one key become one. Takes any number of trees, changes none; the
/// descriptions are those of the first tree that has the node, and shared with it. Other keys than the four are left out.
///
/// :raises ValueError: the identifiers of the trees, or of nodes under one key, are different.
#[pyfunction]
#[pyo3(signature = (*args))]
pub fn merge<'py>(args: &Bound<'py, PyTuple>) -> PyResult<Any<'py>> {
    if args.is_empty() {
        return Ok(create(args.py())?.into_any());
    }
    merged(&args.iter().collect::<Vec<_>>())
}

#[pyfunction]
#[pyo3(signature = (history, recent, start, stop, exact))]
pub fn get_profile<'py>(
    history: Any<'py>,
    recent: Option<Any<'py>>,
    start: Option<Any<'py>>,
    stop: Option<Any<'py>>,
    exact: bool,
) -> PyResult<Any<'py>> {
    let py = history.py();
    let bisect = |name: &str, at: &Any<'py>| -> PyResult<usize> {
        py.import(intern!(py, "bisect"))?
            .call_method1(name, (&history, (at,)))?
            .extract()
    };
    let length = history.len()?;
    let first = match &start {
        Some(start) => bisect("bisect_left", start)?,
        None => 0,
    };
    // A period is stamped at its end, the next one's is what lies beyond `stop`; so the original takes one more. Exactly:
    // those with a stamp up to `stop`, itself included.
    let mut past = match &stop {
        Some(stop) if exact => {
            let mut past = bisect("bisect_right", stop)?;
            while past < length && history.get_item(past)?.get_item(0)?.le(stop)? {
                past += 1;
            }
            past
        }
        Some(stop) => bisect("bisect_right", stop)? + 1,
        None => length,
    };
    let reaches_end = past >= length;
    past = past.min(length);
    let mut states = Vec::new();
    if first == 0 && past == length {
        for state in history.try_iter()? {
            states.push(state?.get_item(1)?);
        }
    } else {
        for at in first..past {
            states.push(history.get_item(at)?.get_item(1)?);
        }
    }
    if states.is_empty() && !exact {
        return Ok(create(py)?.into_any());
    }
    if let Some(recent) = recent
        && recent.is_truthy()?
        && (!exact || reaches_end)
    {
        states.push(recent);
    }
    if states.is_empty() {
        return Ok(create(py)?.into_any());
    }
    merged(&states)
}

/// `dask.utils.format_time`.
fn format_time(n: f64) -> String {
    const DAY: f64 = 86400.0;
    if n > DAY * 2.0 {
        let d = (n / 3600.0 / 24.0).trunc();
        format!("{d}d {}hr", ((n - d * 3600.0 * 24.0) / 3600.0).trunc())
    } else if n > 7200.0 {
        let h = (n / 3600.0).trunc();
        format!("{h}hr {}m", ((n - h * 3600.0) / 60.0).trunc())
    } else if n > 600.0 {
        let m = (n / 60.0).trunc();
        format!("{m}m {}s", (n - m * 60.0).trunc())
    } else if n >= 1.0 {
        format!("{n:.2} s")
    } else if n >= 1e-3 {
        format!("{:.2} ms", n * 1e3)
    } else {
        format!("{:.2} us", n * 1e6)
    }
}

/// A count, as a number to divide by.
fn number(count: &Any<'_>) -> PyResult<f64> {
    match count.cast_exact::<PyFloat>() {
        Ok(float) => Ok(float.value()),
        Err(_) => count.extract(),
    }
}

struct Bar<'py> {
    state: Any<'py>,
    start: f64,
    stop: f64,
    height: usize,
    /// Its start is Python's 0, not 0.0: nothing was added to the root's.
    leftmost: bool,
}

#[pyfunction]
#[pyo3(signature = (state, profile_interval))]
pub fn plot_data<'py>(state: Any<'py>, profile_interval: f64) -> PyResult<Bound<'py, PyDict>> {
    let py = state.py();
    let (count_key, children_key) = (intern!(py, "count"), intern!(py, "children"));
    const NAMES: [&str; 13] = [
        "left",
        "right",
        "bottom",
        "width",
        "top",
        "color",
        "states",
        "filename",
        "line",
        "line_number",
        "name",
        "time",
        "percentage",
    ];
    let mut columns: [Vec<Any<'py>>; 13] = Default::default();
    static COLOR_OF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let color_of = LazyCell::new(|| -> PyResult<Any<'py>> {
        let color_of = COLOR_OF.get_or_try_init(py, || {
            PyResult::Ok(py.import("nativeprof.profile")?.getattr("_color_of")?.unbind())
        })?;
        Ok(color_of.bind(py).clone())
    });
    let colors = PyDict::new(py);
    let mut work = vec![Bar {
        state,
        start: 0.0,
        stop: 1.0,
        height: 0,
        leftmost: true,
    }];
    while let Some(bar) = work.pop() {
        let count = item(&bar.state, count_key)?;
        if !count.is_truthy()? {
            continue;
        }
        let count = number(&count)?;
        let root = bar.height == 0;
        let (start, stop) = (bar.start, bar.stop);
        let width = stop - start;
        let description = item(&bar.state, intern!(py, "description"))?;
        let of = |key: &Bound<'py, PyString>| item(&description, key);
        let filename = of(intern!(py, "filename"))?;
        let color = match colors.get_item(&filename)? {
            Some(color) => color,
            None => {
                let color = color_of.as_ref().map_err(|e| e.clone_ref(py))?.call1((&filename,))?;
                colors.set_item(&filename, &color)?;
                color
            }
        };
        // The root's numbers are whole ones.
        let float = |value: f64, whole: bool| -> PyResult<Any<'py>> {
            Ok(if whole {
                (value as i64).into_pyobject(py)?.into_any()
            } else {
                PyFloat::new(py, value).into_any()
            })
        };
        let row = [
            float(start, bar.leftmost)?,
            float(stop, root)?,
            bar.height.into_pyobject(py)?.into_any(),
            float(width, root)?,
            (bar.height + 1).into_pyobject(py)?.into_any(),
            color,
            bar.state.clone(),
            filename,
            of(intern!(py, "line"))?,
            of(intern!(py, "line_number"))?,
            of(intern!(py, "name"))?,
            PyString::new(py, &format_time(count * profile_interval)).into_any(),
            PyString::new(py, &format!("{:.1}%", 100.0 * width)).into_any(),
        ];
        for (column, value) in columns.iter_mut().zip(row) {
            column.push(value);
        }
        let delta = width / count;
        let mut x = start;
        let mut leftmost = bar.leftmost;
        let from = work.len();
        for (_, child) in items(&item(&bar.state, children_key)?)? {
            let width = number(&item(&child, count_key)?)? * delta;
            work.push(Bar {
                state: child,
                start: x,
                stop: x + width,
                height: bar.height + 1,
                leftmost,
            });
            leftmost = false;
            x += width;
        }
        work[from..].reverse();
    }
    let data = PyDict::new(py);
    for (name, column) in NAMES.iter().zip(columns) {
        data.set_item(name, PyList::new(py, column)?)?;
    }
    Ok(data)
}
