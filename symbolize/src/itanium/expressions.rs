//! Expressions, as they are in template arguments, in `decltype` and in constraints: section 5.1.6 of the ABI.

use super::names::OPERATORS;
use super::{Id, Node, Parser};

/// Operators that are written like a function.
const CALLED: &[(&str, &str)] = &[
    ("nx", "noexcept ("),
    ("sz", "sizeof ("),
    ("az", "alignof ("),
    ("te", "typeid ("),
];
/// The same of types.
const CALLED_WITH_TYPE: &[(&str, &str)] = &[("st", "sizeof ("), ("at", "alignof ("), ("ti", "typeid (")];
const CASTS: &[(&str, &str)] = &[
    ("dc", "dynamic_cast<"),
    ("sc", "static_cast<"),
    ("cc", "const_cast<"),
    ("rc", "reinterpret_cast<"),
];

impl<'a> Parser<'a> {
    pub(super) fn expression(&mut self) -> Option<Id> {
        self.nested(Self::expression_of_any_kind)
    }

    fn operation(&mut self, parts: &[Id]) -> Option<Id> {
        let parts = self.list(parts);
        Some(self.node(Node::Operation(parts)))
    }

    fn operand(&mut self) -> Option<Id> {
        let expression = self.expression()?;
        Some(self.node(Node::Operand(expression)))
    }

    /// An operand that may be a function: its name is enough.
    fn function_operand(&mut self) -> Option<Id> {
        let expression = self.expression()?;
        Some(match self.tree.get(expression) {
            Some(Node::Encoding { name, .. }) => name,
            _ => self.node(Node::Operand(expression)),
        })
    }

    fn commas_until(&mut self, end: &str) -> Option<Id> {
        let all = self.until(end, Self::expression)?;
        let all = self.list(&all);
        Some(self.node(Node::Commas(all)))
    }

    fn expression_of_any_kind(&mut self) -> Option<Id> {
        match (self.peek(), self.peek_at(1), self.peek_at(2)) {
            (b'L', ..) => return self.literal(),
            (b'T', ..) => return self.template_parameter(),
            (b'0'..=b'9', ..) | (b's', b'r', _) | (b'o' | b'd', b'n', _) => return self.unresolved_name(),
            (b'f', b'p', _) | (b'f', b'L', b'0'..=b'9') => return self.function_parameter(),
            (b'f', b'l' | b'r' | b'L' | b'R', _) => return self.fold(),
            (b'g', b's', _) => {
                self.at += 2;
                let parts = [self.word("::"), self.expression()?];
                return Some(self.sequence(&parts));
            }
            // GCC: a template argument that is a pack.
            (b'J', ..) => return self.template_argument(),
            _ => {}
        }
        for (table, is_type) in [(CALLED, false), (CALLED_WITH_TYPE, true)] {
            if let Some((code, text)) = table.iter().find(|(code, _)| self.rest().starts_with(code)) {
                self.at += code.len();
                let of = if is_type { self.a_type()? } else { self.expression()? };
                let parts = [self.word(text), of, self.word(")")];
                return Some(self.sequence(&parts));
            }
        }
        if let Some((code, text)) = CASTS.iter().find(|(code, _)| self.rest().starts_with(code)) {
            self.at += code.len();
            let to = self.a_type()?;
            let parts = [self.word(text), to, self.word(">("), self.expression()?, self.word(")")];
            return Some(self.sequence(&parts));
        }
        let code = self.rest().get(..2)?;
        self.at += 2;
        match code {
            "cv" => self.conversion_expression(),
            "cl" | "cp" => {
                let function = self.function_operand()?;
                let parts = [function, self.word("("), self.commas_until("E")?, self.word(")")];
                self.operation(&parts)
            }
            "tl" | "il" => {
                let of = if code == "tl" { self.a_type()? } else { self.word("") };
                let parts = [of, self.word("{"), self.commas_until("E")?, self.word("}")];
                Some(self.sequence(&parts))
            }
            "di" | "dx" => {
                let (before, after) = if code == "di" { (".", "=") } else { ("[", "]=") };
                let name = if code == "di" {
                    self.source_name()?
                } else {
                    self.expression()?
                };
                let parts = [self.word(before), name, self.word(after), self.expression()?];
                self.operation(&parts)
            }
            "nw" | "na" => self.new_expression(if code == "nw" { "new " } else { "new[] " }),
            "dt" | "pt" => {
                let of = self.operand()?;
                let dot = self.word(if code == "dt" { "." } else { "->" });
                let parts = [of, dot, self.expression()?];
                self.operation(&parts)
            }
            "ix" => {
                let parts = [self.operand()?, self.word("["), self.expression()?, self.word("]")];
                self.operation(&parts)
            }
            "qu" => {
                let condition = self.operand()?;
                let parts = [
                    condition,
                    self.word("?"),
                    self.operand()?,
                    self.word(" : "),
                    self.operand()?,
                ];
                self.operation(&parts)
            }
            "sZ" => {
                let of = if self.peek() == b'T' {
                    self.template_parameter()?
                } else {
                    self.function_parameter()?
                };
                let parts = [self.word("sizeof...("), of, self.word(")")];
                Some(self.sequence(&parts))
            }
            "sP" => {
                let all = self.until("E", Self::template_argument)?;
                let all = self.list(&all);
                let parts = [self.word("sizeof...("), self.node(Node::Commas(all)), self.word(")")];
                Some(self.sequence(&parts))
            }
            "sp" => {
                let of = self.expression()?;
                Some(self.node(Node::Expansion(of)))
            }
            "tr" => Some(self.word("throw")),
            "tw" => {
                let parts = [self.word("throw "), self.expression()?];
                self.operation(&parts)
            }
            "rq" | "rQ" => self.requirements(code == "rQ"),
            _ => {
                let (_, text, operands) = OPERATORS.iter().find(|(known, ..)| *known == code)?;
                self.operator_expression(code, text, *operands)
            }
        }
    }

    fn operator_expression(&mut self, code: &str, text: &'static str, operands: u8) -> Option<Id> {
        let operator = self.word(text);
        match operands {
            1 => {
                // `pp_` and `mm_` come first, `pp` and `mm` last.
                let is_postfix = matches!(code, "pp" | "mm") && !self.take("_");
                let operand = match code {
                    "ad" => self.function_operand()?,
                    _ => self.operand()?,
                };
                let parts = if is_postfix {
                    [operand, operator]
                } else {
                    [operator, operand]
                };
                self.operation(&parts)
            }
            2 => {
                let parts = [self.operand()?, operator, self.operand()?];
                let operation = self.operation(&parts)?;
                // It would end the template arguments.
                if text != ">" {
                    return Some(operation);
                }
                let parts = [self.word("("), operation, self.word(")")];
                Some(self.sequence(&parts))
            }
            _ => None,
        }
    }

    fn conversion_expression(&mut self) -> Option<Id> {
        let to = self.a_type()?;
        let parts = if self.take("_") {
            [
                to,
                self.word("("),
                self.commas_until("E")?,
                self.word(")"),
                self.word(""),
            ]
        } else {
            [self.word("("), to, self.word(")("), self.expression()?, self.word(")")]
        };
        self.operation(&parts)
    }

    fn new_expression(&mut self, text: &'static str) -> Option<Id> {
        let placement = self.commas_until("_")?;
        let mut parts = vec![self.word(text)];
        if matches!(self.tree.get(placement), Some(Node::Commas(list)) if list.start < list.end) {
            parts.extend([self.word("("), placement, self.word(") ")]);
        }
        parts.push(self.a_type()?);
        if self.take("pi") {
            parts.extend([self.word("("), self.commas_until("E")?, self.word(")")]);
        } else if self.peek() == b'i' {
            parts.push(self.expression()?);
        } else {
            self.expect("E")?;
        }
        self.operation(&parts)
    }

    fn function_parameter(&mut self) -> Option<Id> {
        if self.take("fpT") {
            return Some(self.word("this"));
        }
        if self.take("fL") {
            self.number()?;
            self.expect("p")?;
        } else {
            self.expect("fp")?;
        }
        self.cv_qualifiers();
        let number = self.counted()? as u64 + 1;
        let parts = [self.word("{parm#"), self.node(Node::Number(number)), self.word("}")];
        Some(self.sequence(&parts))
    }

    fn fold(&mut self) -> Option<Id> {
        let kind = self.peek_at(1);
        self.at += 2;
        let code = self.rest().get(..2)?;
        let (_, text, _) = OPERATORS
            .iter()
            .find(|(known, _, operands)| *known == code && *operands == 2)?;
        self.at += 2;
        let mut parts = vec![self.word("(")];
        let (operator, dots) = (self.word(text), self.word("..."));
        match kind {
            b'l' => parts.extend([dots, operator, self.operand()?]),
            b'r' => parts.extend([self.operand()?, operator, dots]),
            _ => parts.extend([self.operand()?, operator, dots, operator, self.operand()?]),
        }
        parts.push(self.word(")"));
        Some(self.sequence(&parts))
    }

    fn requirements(&mut self, has_parameters: bool) -> Option<Id> {
        let mut parts = vec![self.word("requires ")];
        if has_parameters {
            let types = self.until("_", Self::a_type)?;
            let types = self.parameters(&types);
            parts.extend([self.word("("), self.node(Node::Commas(types)), self.word(") ")]);
        }
        parts.push(self.word("{"));
        while !self.take("E") {
            match self.peek() {
                b'X' => {
                    self.at += 1;
                    parts.push(self.expression()?);
                    if self.take("N") {
                        parts.push(self.word(" noexcept"));
                    }
                    if self.take("R") {
                        parts.extend([self.word(" -> "), self.class_name()?]);
                    }
                }
                b'T' => {
                    self.at += 1;
                    parts.extend([self.word("typename "), self.a_type()?]);
                }
                b'Q' => {
                    self.at += 1;
                    parts.extend([self.word("requires "), self.expression()?]);
                }
                _ => return None,
            }
            parts.push(self.word("; "));
        }
        parts.push(self.word("}"));
        Some(self.sequence(&parts))
    }

    /// A value: `L`, its type, its digits, `E`; or a function or variable, mangled.
    pub(super) fn literal(&mut self) -> Option<Id> {
        self.expect("L")?;
        if self.take("_Z") || self.take("Z") {
            let name = self.encoding()?;
            self.expect("E")?;
            return Some(name);
        }
        let start = self.at;
        let of = self.a_type()?;
        let code = self.text.get(start..self.at)?;
        let sign = if self.take("n") { "-" } else { "" };
        let digits = self.take_while(|byte| byte.is_ascii_alphanumeric() && byte != b'E' || byte == b'_');
        self.expect("E")?;
        let suffix = match (code, digits) {
            ("b", "0") => return Some(self.word("false")),
            ("b", "1") => return Some(self.word("true")),
            ("i", _) => Some(""),
            ("j", _) => Some("u"),
            ("l", _) => Some("l"),
            ("m", _) => Some("ul"),
            ("x", _) => Some("ll"),
            ("y", _) => Some("ull"),
            _ => None,
        };
        let number = [self.word(sign), self.word(digits)];
        let [sign, digits] = number;
        let parts = match suffix {
            Some(suffix) => vec![sign, digits, self.word(suffix)],
            // The text is not in the name.
            None if matches!(self.tree.get(of), Some(Node::Array(..))) => vec![self.word("\"...\"")],
            // Floating-point numbers are written in hexadecimal, as their bytes.
            None if matches!(code, "f" | "d" | "e" | "g") => {
                vec![self.word("("), of, self.word(")["), sign, digits, self.word("]")]
            }
            None => vec![self.word("("), of, self.word(")"), sign, digits],
        };
        Some(self.sequence(&parts))
    }

    /// The name of something that depends on a template parameter.
    fn unresolved_name(&mut self) -> Option<Id> {
        if !self.take("sr") {
            return self.base_name();
        }
        let (start, substitutions) = (self.at, self.substitutions.len());
        let qualified = match self.peek() {
            b'N' if self.is_clang => self.qualified_by_clang(),
            b'0'..=b'9' => self.levels(None),
            _ => None,
        };
        if qualified.is_some() {
            return qualified;
        }
        self.at = start;
        self.substitutions.truncate(substitutions);
        let scope = self.a_type()?;
        let name = self.base_name()?;
        Some(self.node(Node::Scoped(scope, name)))
    }

    fn qualified_by_clang(&mut self) -> Option<Id> {
        self.expect("N")?;
        let scope = match self.peek() {
            b'T' => {
                let parameter = self.template_parameter()?;
                self.substitutions.push(parameter);
                parameter
            }
            b'D' => {
                let decltype = self.decltype()?;
                self.substitutions.push(decltype);
                decltype
            }
            _ => self.substitution()?,
        };
        let scope = if self.peek() == b'I' {
            let arguments = self.template_arguments()?;
            self.substitutable(Node::Template(scope, arguments))
        } else {
            scope
        };
        self.levels(Some(scope))
    }

    /// Names, `E`, and the last name.
    fn levels(&mut self, mut scope: Option<Id>) -> Option<Id> {
        while !self.take("E") {
            let name = self.simple_name()?;
            scope = Some(scope.map_or(name, |scope| self.node(Node::Scoped(scope, name))));
        }
        let name = self.base_name()?;
        Some(self.node(Node::Scoped(scope?, name)))
    }

    fn simple_name(&mut self) -> Option<Id> {
        let name = self.source_name()?;
        self.with_arguments(name)
    }

    fn with_arguments(&mut self, name: Id) -> Option<Id> {
        if self.peek() != b'I' {
            return Some(name);
        }
        let arguments = self.template_arguments()?;
        Some(self.node(Node::Template(name, arguments)))
    }

    /// The last part of an unresolved name: a name, an operator, or a destructor.
    fn base_name(&mut self) -> Option<Id> {
        if self.take("on") {
            let name = self.operator_name()?;
            return self.with_arguments(name);
        }
        if self.take("dn") {
            let of = if self.peek().is_ascii_digit() {
                self.simple_name()?
            } else {
                self.a_type()?
            };
            let parts = [self.word("~"), of];
            return Some(self.sequence(&parts));
        }
        match self.peek() {
            b'0'..=b'9' => self.simple_name(),
            // GCC omits `on`.
            _ => {
                let name = self.operator_name()?;
                self.with_arguments(name)
            }
        }
    }
}
