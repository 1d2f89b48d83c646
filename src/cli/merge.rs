//! `merge`: several saved profiles as one.

use std::collections::BTreeSet;

use super::args::Merge;
use super::open;
use super::output::Output;
use super::say;
use crate::combine::combine;
use crate::error::Result;
use crate::process::privilege;
use crate::resolve::sources;
use crate::tree::profile::Profile;

/// Reads profiles and writes their sum.
pub fn merge(options: &Merge) -> Result<()> {
    privilege::become_caller()?;
    let output = Output::new(Some(&options.output), options.format.as_deref(), "")?.shown(&options.shown)?;
    let profiles = open::profiles(&options.files, output.needs())?;
    let names = options.files.iter().map(|path| open::shown(path));
    let profiles: Vec<(String, Profile)> = names.zip(profiles).collect();
    let mut seen = BTreeSet::new();
    for (name, profile) in &profiles {
        if !seen.insert(name) {
            say(&format!("{name} is named twice: its samples count twice"));
        }
        if profile.nodes[0].count == 0 {
            say(&format!("{name} has no samples"));
        }
    }
    let rates: BTreeSet<u64> = profiles.iter().map(|(_, profile)| profile.meta.rate).collect();
    if rates.len() > 1 {
        let unknown = |rate: &u64| {
            if *rate == 0 {
                "unknown".into()
            } else {
                format!("{rate} Hz")
            }
        };
        let rates: Vec<String> = rates.iter().map(unknown).collect();
        say(&format!(
            "the rates differ ({}): what was sampled more often weighs more; its CPU time does not (--value cpu)",
            rates.join(", ")
        ));
    }
    let mut sum = combine(&profiles);
    output.check(&sum)?;
    if output.quotes_source() {
        sources::add(&mut sum, &mut sources::open_here);
    }
    say(&format!(
        "{} samples of {} profiles",
        sum.nodes[0].count,
        profiles.len()
    ));
    say(&format!("written: {}", output.write(&sum)?));
    Ok(())
}
