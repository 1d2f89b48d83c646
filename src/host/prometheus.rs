//! Text in the format that Prometheus reads (exposition format 0.0.4).

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// Metrics whose names begin with a common prefix.
pub struct MetricsText {
    prefix: &'static str,
    text: String,
}

impl MetricsText {
    /// `prefix`: what all names begin with, such as `nativeprof_`.
    pub fn new(prefix: &'static str) -> MetricsText {
        MetricsText {
            prefix,
            text: String::new(),
        }
    }

    /// A metric with one value. `kind`: `counter` or `gauge`.
    pub fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        let _ = writeln!(self.text, "{}{name} {value}", self.prefix);
    }

    /// A metric with a value for each value of a label.
    pub fn by<V: Display>(&mut self, name: &str, kind: &str, help: &str, label: &str, values: &BTreeMap<String, V>) {
        self.head(name, kind, help);
        for (key, value) in values {
            let key = key.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = writeln!(self.text, "{}{name}{{{label}=\"{key}\"}} {value}", self.prefix);
        }
    }

    /// The text. Each line ends with a line feed.
    pub fn finish(self) -> String {
        self.text
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let prefix = self.prefix;
        let _ = write!(
            self.text,
            "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}\n"
        );
    }
}
