//! What the samples of segments can be selected by.

use std::collections::BTreeSet;

use super::segments::attribute;
use super::tables::{Tables, number_of};
use super::{heads, small};
use crate::import::Damage;
use crate::otlp;
use crate::otlp::messages::Any;

/// Names of one kind that are kept.
const MAX_NAMES: usize = 16_384;

/// Names and numbers of services, containers and processes that have samples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentNames {
    /// Values of `service.name`.
    pub services: BTreeSet<String>,
    /// Names and identifiers.
    pub containers: BTreeSet<String>,
    /// Names of executables.
    pub comms: BTreeSet<String>,
    /// Numbers of processes.
    pub pids: BTreeSet<u32>,
}

impl SegmentNames {
    /// Adds those of a segment, the message `ProfilesData`. Of each kind, 16,384 are kept.
    ///
    /// # Errors
    /// It is damaged, or exceeds a limit.
    pub fn add(&mut self, message: &[u8]) -> Result<(), Damage> {
        let tables = Tables::of(message)?;
        let (resources, profiles, _) = heads(message, &tables)?;
        for resource in &resources {
            for (key, name) in &resource.labels {
                let kind = match key.as_str() {
                    otlp::SERVICE_NAME => &mut self.services,
                    _ => &mut self.containers,
                };
                insert(kind, name.clone());
            }
        }
        for head in &profiles {
            let Some(Any::Array(processes)) = attribute(head, otlp::PROCESSES, &tables)? else {
                continue;
            };
            for process in &processes.values {
                let Some(Any::List(facts)) = &process.value else {
                    continue;
                };
                for fact in &facts.values {
                    match &*tables.key(fact)? {
                        otlp::PROCESS_PID => insert(&mut self.pids, small(number_of(fact.value.as_ref()))),
                        otlp::PROCESS_NAME => {
                            let name = tables.text_of(fact.value.as_ref())?;
                            name.into_iter().for_each(|name| insert(&mut self.comms, name));
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }
}

fn insert<T: Ord>(names: &mut BTreeSet<T>, name: T) {
    if names.len() < MAX_NAMES {
        names.insert(name);
    }
}
