//! Counting stacks in Dask's tree: `process` and `llprocess` of `distributed.profile`, over Python's own dictionaries.
//!
//! Semantics are those of distributed 2026.8.0, `distributed/profile.py`; what is surprising there is described in
//! `nativeprof/profile.py`.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict, PyList, PyString, PyTuple, PyWeakrefReference};

/// The identifiers of code objects that live: making the string again costs more than all else that is done for a frame.
/// An entry goes when its code object does, before its address can become another's.
#[derive(Default)]
struct Identifiers {
    by_code: HashMap<usize, (Py<PyAny>, Py<PyString>)>,
    code_of: HashMap<usize, usize>,
    forget: Option<Py<PyAny>>,
}

static IDENTIFIERS: Mutex<Option<Identifiers>> = Mutex::new(None);

/// Held for a lookup or a change only. Nothing is dropped, and no Python code runs, while it is.
fn identifiers() -> MutexGuard<'static, Option<Identifiers>> {
    IDENTIFIERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The callback of a weak reference to a code object that died.
fn forget(reference: &Bound<'_, PyAny>) {
    let dropped = {
        let mut guard = identifiers();
        guard.as_mut().and_then(|all| {
            let code = all.code_of.remove(&(reference.as_ptr() as usize))?;
            all.by_code.remove(&code)
        })
    };
    drop(dropped);
}

fn function<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyAny>>,
    module: &str,
    name: &str,
) -> PyResult<&'py Bound<'py, PyAny>> {
    cell.get_or_try_init(py, || Ok(py.import(module)?.getattr(name)?.unbind()))
        .map(|f| f.bind(py))
}

static FRAME_TYPE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static CODE_TYPE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

fn is_exactly(object: &Bound<'_, PyAny>, kind: &Bound<'_, PyAny>) -> bool {
    object.get_type().is(kind)
}

/// `identifier(frame)`, the same string object for the same code object.
fn identifier<'py>(frame: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
    let py = frame.py();
    let code = frame.getattr(intern!(py, "f_code"))?;
    let known = is_exactly(&code, function(py, &CODE_TYPE, "types", "CodeType")?)
        && is_exactly(frame, function(py, &FRAME_TYPE, "types", "FrameType")?);
    if !known {
        static IDENTIFIER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let text = function(py, &IDENTIFIER, "nativeprof.profile", "identifier")?.call1((frame,))?;
        return Ok(text.cast_into()?);
    }
    let address = code.as_ptr() as usize;
    if let Some(found) = identifiers()
        .as_ref()
        .and_then(|all| Some(all.by_code.get(&address)?.1.clone_ref(py)))
    {
        return Ok(found.into_bound(py));
    }
    let parts = (
        code.getattr(intern!(py, "co_name"))?,
        code.getattr(intern!(py, "co_filename"))?,
        code.getattr(intern!(py, "co_firstlineno"))?.str()?,
    );
    let text = intern!(py, ";").call_method1("join", (parts,))?.cast_into()?;
    remember(&code, &text)?;
    Ok(text)
}

fn remember(code: &Bound<'_, PyAny>, text: &Bound<'_, PyString>) -> PyResult<()> {
    let py = code.py();
    let callback = {
        let guard = identifiers();
        guard.as_ref().and_then(|all| Some(all.forget.as_ref()?.clone_ref(py)))
    };
    let callback = match callback {
        Some(callback) => callback.into_bound(py),
        None => PyCFunction::new_closure(
            py,
            None,
            None,
            |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
                arguments.get_item(0).map(|reference| forget(&reference))
            },
        )?
        .into_any(),
    };
    let reference = PyWeakrefReference::new_with(code, &callback)?;
    let entry = (reference.clone().into_any().unbind(), text.clone().unbind());
    let (code, reference) = (code.as_ptr() as usize, reference.as_ptr() as usize);
    let dropped = {
        let mut guard = identifiers();
        let all = guard.get_or_insert_default();
        let first = all.forget.replace(callback.unbind());
        let second = all.by_code.insert(code, entry);
        if let Some((old, _)) = &second {
            all.code_of.remove(&(old.as_ptr() as usize));
        }
        all.code_of.insert(reference, code);
        (first, second)
    };
    drop(dropped);
    Ok(())
}

/// `object[key]`; quick where the object is a dictionary.
pub fn item<'py>(object: &Bound<'py, PyAny>, key: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    match object.cast_exact::<PyDict>() {
        Ok(dict) => dict
            .get_item(key)?
            .ok_or_else(|| PyKeyError::new_err(key.clone().unbind())),
        Err(_) => object.get_item(key),
    }
}

/// `node["count"] += 1`
fn count_one(node: &Bound<'_, PyAny>) -> PyResult<()> {
    let key = intern!(node.py(), "count");
    node.set_item(key, item(node, key)?.add(1)?)
}

/// The child of a node by its identifier, made where there is none. `describe` makes the description of a new one.
fn child_of<'py>(
    state: &Bound<'py, PyAny>,
    identifier: &Bound<'py, PyString>,
    describe: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = state.py();
    let children = item(state, intern!(py, "children"))?;
    let found = match children.cast_exact::<PyDict>() {
        Ok(dict) => dict.get_item(identifier)?,
        Err(_) => match children.get_item(identifier) {
            Ok(found) => Some(found),
            Err(e) if e.is_instance_of::<PyKeyError>(py) => None,
            Err(e) => return Err(e),
        },
    };
    if let Some(found) = found {
        return Ok(found);
    }
    let node = PyDict::new(py);
    node.set_item(intern!(py, "count"), 0)?;
    node.set_item(intern!(py, "description"), describe()?)?;
    node.set_item(intern!(py, "children"), PyDict::new(py))?;
    node.set_item(intern!(py, "identifier"), identifier)?;
    children.set_item(identifier, &node)?;
    Ok(node.into_any())
}

/// Whether a frame's file name ends with `suffix`, as `str.endswith` has it.
fn file_ends_with(frame: &Bound<'_, PyAny>, suffix: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = frame.py();
    let file = frame
        .getattr(intern!(py, "f_code"))?
        .getattr(intern!(py, "co_filename"))?;
    if let (Ok(file), Ok(suffix)) = (file.cast_exact::<PyString>(), suffix.cast_exact::<PyString>())
        && let (Ok(file), Ok(suffix)) = (file.to_cow(), suffix.to_cow())
    {
        return Ok(file.ends_with(&*suffix));
    }
    file.call_method1(intern!(py, "endswith"), (suffix,))?.is_truthy()
}

/// Frames that are left where no depth is given: outer ones beyond them are cut.
fn usual_depth(py: Python<'_>) -> PyResult<i64> {
    let limit: i64 = py.import("sys")?.call_method0("getrecursionlimit")?.extract()?;
    Ok((limit / 4).min(100))
}

/// Counts a stack of Python frames in a tree.
///
/// :param frame: the innermost frame.
/// :param child: None for a complete sample: each function on the stack is counted once. Anything else: native frames may
///     follow (:func:`llprocess`), the innermost function is *not* counted, and its node is returned. As the original has
///     it: where no native frame follows, it stays uncounted. :func:`add_sample` does both and counts it always.
/// :param state: the tree, changed in place.
/// :param stop: suffix of file names: callers from the innermost such one outward are left out. ``frame`` itself is not
///     looked at.
/// :param omit: suffixes of file names: if ``frame`` is in such a file nothing is counted. As the original has it, a bare
///     string is taken letter by letter, which drops nearly all samples; :func:`add_sample` takes one.
/// :param depth: callers that are kept, the innermost ones; None: 100, or a quarter of the recursion limit if that is less.
/// :returns: the node of the innermost function if ``child`` is given, else None.
/// :raises KeyError: ``state`` is no tree.
#[pyfunction]
#[pyo3(signature = (frame, child, state, *, stop=None, omit=None, depth=None))]
pub fn process<'py>(
    frame: Bound<'py, PyAny>,
    child: Option<Bound<'py, PyAny>>,
    state: Bound<'py, PyAny>,
    stop: Option<Bound<'py, PyAny>>,
    omit: Option<Bound<'py, PyAny>>,
    depth: Option<i64>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = frame.py();
    let mut depth = match depth {
        Some(depth) => depth,
        None => usual_depth(py)?,
    };
    if let Some(omit) = omit {
        for suffix in omit.try_iter()? {
            if file_ends_with(&frame, &suffix?)? {
                return Ok(None);
            }
        }
    }
    let mut frames = vec![frame];
    loop {
        let outer = frames[frames.len() - 1].getattr(intern!(py, "f_back"))?;
        if depth <= 0 || outer.is_none() {
            break;
        }
        if let Some(stop) = &stop
            && file_ends_with(&outer, stop)?
        {
            break;
        }
        depth -= 1;
        frames.push(outer);
    }
    static INFO_FRAME: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let mut state = state;
    for frame in frames.iter().rev() {
        let describe = || function(py, &INFO_FRAME, "nativeprof.profile", "info_frame")?.call1((frame,));
        let node = child_of(&state, &identifier(frame)?, describe)?;
        count_one(&state)?;
        state = node;
    }
    if child.is_some() {
        return Ok(Some(state));
    }
    count_one(&state)?;
    Ok(None)
}

/// `hex(number)` of Python.
fn hex(number: i128) -> String {
    let sign = if number < 0 { "-" } else { "" };
    format!("{sign}{:#x}", number.unsigned_abs())
}

/// Counts native frames below a node of :func:`process`.
///
/// :param frames: outermost first, as :func:`ll_get_stack` gives them; **left empty**, as by the original. None or an empty
///     list: nothing happens. A frame has ``addr`` and ``offset`` (bytes; their difference is the function's start and part
///     of what makes two frames one node), ``name``, and its text is the node's ``line``.
/// :param child: None: the innermost frame is counted. Anything else: it is not, and its node is returned.
/// :param state: the node of the function that called them, changed in place.
#[pyfunction]
#[pyo3(signature = (frames, child, state))]
pub fn llprocess<'py>(
    frames: Option<Bound<'py, PyAny>>,
    child: Option<Bound<'py, PyAny>>,
    state: Option<Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(frames) = frames else { return Ok(None) };
    let py = frames.py();
    // Innermost last, and the list is left empty.
    let mut entries: Vec<Bound<'py, PyAny>>;
    match frames.cast_exact::<PyList>() {
        Ok(list) => {
            entries = list.iter().collect();
            list.del_slice(0, list.len())?;
        }
        Err(_) => {
            entries = Vec::new();
            while frames.is_truthy()? {
                entries.push(frames.call_method0(intern!(py, "pop"))?);
            }
            entries.reverse();
        }
    }
    if entries.is_empty() {
        return Ok(None);
    }
    let mut state = state.unwrap_or_else(|| py.None().into_bound(py));
    for entry in &entries {
        let addr = entry.getattr(intern!(py, "addr"))?;
        let offset = entry.getattr(intern!(py, "offset"))?;
        let start: i128 = addr.sub(offset)?.extract()?;
        let name = entry.getattr(intern!(py, "name"))?;
        let text = name.str()?;
        let identifier = match text.to_cow() {
            Ok(text) => PyString::new(py, &format!("{text};<low-level>;{}", hex(start))),
            Err(_) => text.add(intern!(py, ";<low-level>;"))?.add(hex(start))?.cast_into()?,
        };
        let describe = || {
            let description = PyDict::new(py);
            description.set_item(intern!(py, "filename"), intern!(py, "<low-level>"))?;
            description.set_item(intern!(py, "name"), name)?;
            description.set_item(intern!(py, "line_number"), 0)?;
            description.set_item(intern!(py, "line"), entry.str()?)?;
            Ok(description.into_any())
        };
        let node = child_of(&state, &identifier, describe)?;
        count_one(&state)?;
        state = node;
    }
    if child.is_some() {
        return Ok(Some(state));
    }
    count_one(&state)?;
    Ok(None)
}
