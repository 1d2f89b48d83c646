//! Frames of nodes, from their identifiers and descriptions. Each distinct frame is kept once.

use std::borrow::Cow;
use std::hash::BuildHasher;

use super::super::write::KINDS;
use super::{Description, JsonReader, old_keys};
use crate::model::{Frame, FrameId, FrameKind};
use crate::view::{LOW_LEVEL, unknown_place};

impl<'a> JsonReader<'a> {
    /// The frame of a node, the first line seen and its text.
    pub(super) fn frame_of(
        &mut self,
        identifier: &str,
        mut read: Description<'a>,
        is_root: bool,
    ) -> (FrameId, u32, Cow<'a, str>) {
        let kind = match KINDS.iter().chain(old_keys::KINDS).find(|(name, _)| *name == read.kind) {
            _ if is_root => FrameKind::Root,
            Some((_, kind)) => *kind,
            // A tree of Dask itself has native frames without any key of ours.
            None if read.filename == LOW_LEVEL && identifier.contains(";<low-level>;0x") => FrameKind::Native,
            None => FrameKind::Python,
        };
        let python = kind == FrameKind::Python;
        let last = identifier.rsplit(';').next().unwrap_or("");
        let first_line = if python { last.parse().unwrap_or(0) } else { 0 };
        let hex = last.strip_prefix("0x").filter(|_| !python);
        let address = hex.and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0);
        if kind == FrameKind::Unknown
            && let Some(name) = read.name.strip_suffix(&unknown_place(&read.module, address))
        {
            read.name = Cow::Owned(name.to_string());
        }
        if kind == FrameKind::Truncated {
            read.name = old_keys::truncated_name(read.name);
        }
        let (line, text) = if python {
            (read.line_number, read.line)
        } else {
            (read.source_line, read.source_text)
        };
        let texts = [read.name, read.qualname, read.filename, read.module, read.source];
        (self.frame(kind, texts, first_line, address), line, text)
    }

    /// The frame of these parts, a new one if there is none yet. `texts`: name, qualname, filename, module, source.
    fn frame(&mut self, kind: FrameKind, texts: [Cow<'a, str>; 5], first_line: u32, address: u64) -> FrameId {
        let (frames, hasher) = (&mut self.profile.frames, &self.hasher);
        let parts = |f: &Frame| -> u64 {
            let texts = [&f.name, &f.qualname, &f.filename, &f.module, &f.source];
            hasher.hash_one((f.kind, texts.map(String::as_str), f.first_line, f.address))
        };
        let hash = hasher.hash_one((kind, texts.each_ref().map(|text| &**text), first_line, address));
        let is = |id: &FrameId| {
            let f = &frames[*id as usize];
            (f.kind, f.first_line, f.address) == (kind, first_line, address)
                && [&f.name, &f.qualname, &f.filename, &f.module, &f.source] == texts.each_ref()
        };
        if let Some(known) = self.frames.find(hash, is) {
            return *known;
        }
        let [name, qualname, filename, module, source] = texts.map(Cow::into_owned);
        let next = frames.len() as FrameId;
        frames.push(Frame {
            kind,
            name,
            qualname,
            filename,
            first_line,
            address,
            module,
            source,
        });
        self.frames.insert_unique(hash, next, |id| parts(&frames[*id as usize]));
        next
    }
}
