//! The verdict in the XML format of JUnit, which CI systems show as test results: a test case for the gate, and one for each row
//! that is judged.

use std::fmt::Write as _;

use super::gate::{Gate, Judged, Ruling, Verdict};
use super::text::Text;
use crate::escape::xml;
use crate::profile::model::FrameKind;

impl Text<'_> {
    /// The document.
    pub fn junit(&self, verdict: &Verdict<'_>) -> String {
        let judged: Vec<&Judged<'_>> = verdict
            .rows
            .iter()
            .filter(|row| !matches!(row.ruling, Ruling::NotTested))
            .collect();
        let mut cases = String::new();
        let lines: Vec<String> = verdict.lines().collect();
        let what = lines.first().map_or("", String::as_str);
        let of_gate = match verdict.gate {
            Gate::Passed => String::new(),
            Gate::Grown => problem("failure", "grown", what, &lines.join("\n")),
            Gate::Undecided => problem("error", "undecided", what, &lines.join("\n")),
        };
        let name = format!("--fail-above {}", verdict.limit);
        cases += &case("nativeprof.gate", &name, "", &of_gate);
        for row in &judged {
            let words = self.words(row.change);
            let ruling = match &row.ruling {
                Ruling::Grown(growth) => problem("failure", "grown", growth, &words),
                Ruling::Undecided(why) => format!("      <skipped message=\"{}\"/>\n", xml(why)),
                Ruling::Passed | Ruling::NotTested => String::new(),
            };
            let said = format!("{ruling}      <system-out>{}</system-out>\n", xml(&words));
            let file = match &row.change.frame {
                frame if row.row.kind == Some(FrameKind::Python) => {
                    format!(" file=\"{}\" line=\"{}\"", xml(&frame.filename), frame.first_line)
                }
                _ => String::new(),
            };
            cases += &case(&class(row), &row.row.name, &file, &said);
        }
        let count = |is_it: &dyn Fn(&Ruling) -> bool| judged.iter().filter(|row| is_it(&row.ruling)).count();
        let counts = format!(
            "tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"0\"",
            judged.len() + 1,
            count(&|ruling| matches!(ruling, Ruling::Grown(_))) + usize::from(verdict.gate == Gate::Grown),
            usize::from(verdict.gate == Gate::Undecided),
            count(&|ruling| matches!(ruling, Ruling::Undecided(_))),
        );
        let mut out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_string();
        let about = [self.about(), self.renamed()].concat();
        let about: String = about.iter().map(|text| xml(text) + "\n").collect();
        // Writing to a String does not fail.
        let _ = write!(
            out,
            "<testsuites name=\"nativeprof\" {counts}>\n  <testsuite name=\"nativeprof diff\" {counts}>\n{cases}    \
             <system-out>{about}</system-out>\n  </testsuite>\n</testsuites>\n"
        );
        out
    }
}

/// Where a row is: what test results are grouped by.
fn class(row: &Judged<'_>) -> String {
    match row.row.kind {
        Some(FrameKind::Python) => row.change.frame.filename.clone(),
        _ if row.row.place.is_empty() => "nativeprof".into(),
        _ => row.row.place.clone(),
    }
}

fn problem(element: &str, kind: &str, message: &str, text: &str) -> String {
    let text: Vec<String> = text.lines().map(xml).collect();
    format!(
        "      <{element} type=\"{kind}\" message=\"{}\">{}</{element}>\n",
        xml(message),
        text.join("\n")
    )
}

fn case(class: &str, name: &str, attributes: &str, content: &str) -> String {
    let start = format!(
        "    <testcase classname=\"{}\" name=\"{}\"{attributes} time=\"0\"",
        xml(class),
        xml(name)
    );
    if content.is_empty() {
        start + "/>\n"
    } else {
        format!("{start}>\n{content}    </testcase>\n")
    }
}
