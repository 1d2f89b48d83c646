//! `merge`: several saved profiles as one.

use std::collections::BTreeSet;

use crate::cli::args::Merge;
use crate::cli::input;
use crate::cli::output::Output;
use crate::cli::print_status;
use crate::error::Result;
use crate::privileges::phases;
use crate::profile::merge::combine;
use crate::profile::model::Profile;
use crate::profile::summary::{self, counted};
use crate::resolve::source_lines;

/// Reads profiles and writes their sum.
pub fn merge(options: &Merge) -> Result<()> {
    phases::switch_to_invoking_user()?;
    let output = Output::new(Some(&options.output), options.format.as_deref(), "merged")?
        .shown(&options.shown, options.no_native)?;
    output.check_inputs(&options.files)?;
    let profiles = input::profiles(&options.files, output.needs())?;
    let names = options.files.iter().map(|path| input::shown(path));
    let profiles: Vec<(String, Profile)> = names.zip(profiles).collect();
    let mut seen = BTreeSet::new();
    for (name, profile) in &profiles {
        if !seen.insert(name) {
            print_status(&format!("{name} is given twice; it counts twice"));
        }
        if profile.nodes[0].count == 0 {
            print_status(&format!("{name} has no samples"));
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
        print_status(&format!(
            "the rates differ ({}): profiles with a higher rate weigh more in sample counts; compare CPU time instead (--value cpu)",
            rates.join(", ")
        ));
    }
    let mut sum = combine(&profiles);
    output.check(&sum)?;
    if output.quotes_source() {
        source_lines::add(&mut sum, &mut source_lines::open_local);
    }
    print_status(&format!(
        "{} from {}",
        summary::amount(sum.count_type(), sum.nodes[0].count),
        counted(profiles.len() as u64, "profiles")
    ));
    print_status(&format!("written: {}", output.write(&sum)?));
    output.browse(false);
    output.check_written()
}
