//! Views of a finished profile, as profiles: without the interpreter's own frames, without native code, without the
//! standard library or libraries, of one function alone.

use std::collections::HashMap;

use super::category::{Categories, Category, GARBAGE_COLLECTION, LIBRARIES_ROW, NATIVE_ROW, STANDARD_ROW};
use super::fold::{DROPPED, Folding, is_container};
use super::folded::without_interpreter_frames;
use super::model::{Frame, NodeId, Profile};
use super::{idle, task_groups};

/// What to leave out of a profile before it is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ViewOptions {
    /// Keep the interpreter's own frames: start-up and bytecode loop.
    pub interpreter_frames: bool,
    /// Keep the stacks of idle pools; else each pool is one frame ([`crate::idle`]).
    pub idle: bool,
    /// Keep the names of tasks that the program gave none; else these are grouped by what they run ([`crate::task_groups`]).
    pub task_names: bool,
    /// Count native code and the kernel as part of the Python function that called it.
    pub no_native: bool,
    /// Count the standard library as part of what called it.
    pub hide_stdlib: bool,
    /// Count installed libraries as part of what called them.
    pub hide_libraries: bool,
    /// Only samples with the function of this name on their stacks, from it on inward.
    pub focus: Option<String>,
}

/// The name to focus on is not that of any function with samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchFunction {
    /// The name as it was given.
    pub name: String,
    /// Names of functions that contain it, those with most samples first, a few.
    pub similar: Vec<String>,
}

impl ViewOptions {
    /// The profile as it is recorded, with nothing left out.
    pub fn all() -> ViewOptions {
        ViewOptions {
            interpreter_frames: true,
            idle: true,
            task_names: true,
            ..ViewOptions::default()
        }
    }

    /// The view of a profile.
    ///
    /// # Errors
    /// If there is no function to focus on.
    pub fn apply(&self, profile: Profile) -> Result<Profile, NoSuchFunction> {
        let mut profile = self.folded(profile);
        if let Some(name) = &self.focus {
            profile = focus(&profile, name)?;
        }
        Ok(self.without_hidden(profile))
    }

    /// The views of profiles to compare. The function to focus on may be in one of them only; samples that do not have
    /// it are at the root, so that shares remain those of all samples.
    ///
    /// # Errors
    /// If none has the function to focus on.
    pub fn apply_to_all(&self, profiles: Vec<Profile>) -> Result<Vec<Profile>, NoSuchFunction> {
        let mut profiles: Vec<Profile> = profiles.into_iter().map(|profile| self.folded(profile)).collect();
        if let Some(name) = &self.focus {
            let named: Vec<_> = profiles.iter().map(|profile| functions_named(profile, name)).collect();
            if named.iter().all(Option::is_none) {
                return Err(NoSuchFunction {
                    name: name.clone(),
                    similar: profiles.last().map_or(Vec::new(), |profile| similar(profile, name)),
                });
            }
            for (profile, named) in profiles.iter_mut().zip(named) {
                let named = named.unwrap_or_else(|| vec![false; profile.frames.len()]);
                *profile = focus_on(profile, &named, Folding::ROOT);
            }
        }
        Ok(profiles
            .into_iter()
            .map(|profile| self.without_hidden(profile))
            .collect())
    }

    /// The profile with one frame for each group of frames that is shown as one.
    pub fn folded(&self, mut profile: Profile) -> Profile {
        if !self.idle {
            profile = idle::fold(&profile).unwrap_or(profile);
        }
        if !self.task_names {
            profile = task_groups::fold(&profile).unwrap_or(profile);
        }
        if self.interpreter_frames {
            profile
        } else {
            without_interpreter_frames(&profile)
        }
    }

    fn without_hidden(&self, mut profile: Profile) -> Profile {
        if self.no_native {
            profile = without_native(&profile);
        }
        if self.hide_stdlib || self.hide_libraries {
            profile = without_libraries(&profile, self.hide_stdlib, self.hide_libraries);
        }
        profile
    }
}

/// The profile with native code and kernel as part of the Python function that called it. What no Python function called
/// is one row, `[native code]`. Garbage collections, which no function calls, stay.
pub fn without_native(profile: &Profile) -> Profile {
    let is_native = |frame: &Frame| {
        let is_collection = frame.module.is_empty() && frame.name == GARBAGE_COLLECTION;
        (frame.kind.is_native() && !is_collection).then_some(NATIVE_ROW)
    };
    without(profile, is_native)
}

/// The profile with the standard library, or installed libraries and their extensions, as part of what called them. What
/// nothing else called is one row, `[standard library]` or `[libraries]`.
pub fn without_libraries(profile: &Profile, standard: bool, libraries: bool) -> Profile {
    let categories = Categories::new(profile);
    let is_hidden = |frame: &Frame| match categories.of(frame)?.0 {
        Category::Standard if standard => Some(STANDARD_ROW),
        Category::Library if libraries => Some(LIBRARIES_ROW),
        // Own extensions have no place among installed packages.
        Category::Extension if libraries && !categories.is_own_extension(frame) => Some(LIBRARIES_ROW),
        _ => None,
    };
    without(profile, is_hidden)
}

/// The profile without the frames that `row` names a row for; of their stacks, what calls them gets their samples, and
/// the row if nothing does.
fn without(profile: &Profile, row: impl Fn(&Frame) -> Option<&'static str>) -> Profile {
    let rows: Vec<Option<&'static str>> = profile.frames.iter().map(row).collect();
    let mut out = Folding::new(profile);
    // By node: its base in the new tree, and whether that is a frame that calls.
    let mut base: Vec<(NodeId, bool)> = Vec::with_capacity(profile.nodes.len());
    for (at, node) in profile.nodes.iter().enumerate() {
        if at == 0 {
            out.keep(Folding::ROOT);
            base.push((Folding::ROOT, false));
            continue;
        }
        let Some(parent) = Folding::parent(profile, at).filter(|parent| base[*parent].0 != DROPPED) else {
            out.fold(DROPPED);
            base.push((DROPPED, false));
            continue;
        };
        let (under, is_called) = base[parent];
        match rows[node.frame as usize] {
            None => {
                let into = out.child(under, node.frame);
                out.keep(into);
                let is_code = !is_container(&profile.frames[node.frame as usize]);
                base.push((into, is_code));
            }
            Some(_) if is_called => {
                out.fold(under);
                base.push((under, true));
            }
            Some(name) => {
                let frame = out.row(name);
                let row = out.child(under, frame);
                out.fold(row);
                base.push((under, false));
            }
        }
    }
    out.finish()
}

/// The samples that have a function on their stacks, from its outermost call on inward. Functions are those with this
/// name or qualified name (`run`, `Job.run`).
///
/// # Errors
/// If no function with samples has the name.
pub fn focus(profile: &Profile, name: &str) -> Result<Profile, NoSuchFunction> {
    match functions_named(profile, name) {
        Some(named) => Ok(focus_on(profile, &named, DROPPED)),
        None => Err(NoSuchFunction {
            name: name.into(),
            similar: similar(profile, name),
        }),
    }
}

/// By frame, whether it is a function with this name or qualified name; `None` if none of them has samples.
fn functions_named(profile: &Profile, name: &str) -> Option<Vec<bool>> {
    let is_named = |frame: &Frame| !is_container(frame) && (frame.name == name || frame.qualname == name);
    let named: Vec<bool> = profile.frames.iter().map(is_named).collect();
    let mut nodes = profile.nodes.iter();
    let has_samples = nodes.any(|node| node.count > 0 && named.get(node.frame as usize) == Some(&true));
    has_samples.then_some(named)
}

/// The profile with the frames in `named` and what is inward of them; the other samples go to `rest`.
fn focus_on(profile: &Profile, named: &[bool], rest: NodeId) -> Profile {
    let mut out = Folding::new(profile);
    // By node: its base in the new tree, and whether it is in focus.
    let mut base: Vec<(NodeId, bool)> = Vec::with_capacity(profile.nodes.len());
    for (at, node) in profile.nodes.iter().enumerate() {
        let Some((under, is_inside)) = Folding::parent(profile, at).map(|parent| base[parent]) else {
            out.fold(rest);
            base.push((Folding::ROOT, false));
            continue;
        };
        let is_group = is_container(&profile.frames[node.frame as usize]);
        if is_inside || named[node.frame as usize] || is_group {
            let into = out.child(under, node.frame);
            if is_group {
                out.fold(rest)
            } else {
                out.keep(into)
            }
            base.push((into, !is_group));
        } else {
            out.fold(rest);
            base.push((under, false));
        }
    }
    out.finish()
}

/// The samples whose stacks have a frame that `is_root` accepts, from the innermost such frame on inward. Above a frame that
/// `is_tool` accepts nothing counts as a root.
pub fn from_innermost(
    profile: &Profile,
    is_root: impl Fn(&Frame) -> bool,
    is_tool: impl Fn(&Frame) -> bool,
) -> Profile {
    let mut out = Folding::new(profile);
    // By node: its base in the new tree; `DROPPED` outside of any root.
    let mut base: Vec<NodeId> = Vec::with_capacity(profile.nodes.len());
    for (at, node) in profile.nodes.iter().enumerate() {
        let frame = profile.frames.get(node.frame as usize);
        let under = Folding::parent(profile, at).map_or(DROPPED, |parent| base[parent]);
        let into = match frame {
            Some(frame) if is_root(frame) => out.child(Folding::ROOT, node.frame),
            Some(frame) if under != DROPPED && !is_tool(frame) => out.child(under, node.frame),
            _ => DROPPED,
        };
        match into {
            DROPPED => out.fold(DROPPED),
            into => out.keep(into),
        }
        base.push(into);
    }
    out.finish()
}

/// Names of a few functions that contain a name, whatever its case.
fn similar(profile: &Profile, name: &str) -> Vec<String> {
    let name = name.to_lowercase();
    let mut found: HashMap<&str, u64> = HashMap::new();
    for node in &profile.nodes {
        let Some(frame) = profile.frames.get(node.frame as usize).filter(|f| !is_container(f)) else {
            continue;
        };
        if !frame.name.to_lowercase().contains(&name) {
            continue;
        }
        let count = found.entry(&frame.name).or_default();
        *count = (*count).max(node.count);
    }
    let mut found: Vec<(u64, &str)> = found.into_iter().map(|(name, count)| (count, name)).collect();
    found.sort_by(|a, b| (b.0, a.1).cmp(&(a.0, b.1)));
    found.into_iter().take(5).map(|(_, name)| name.to_string()).collect()
}

#[cfg(test)]
mod tests;
