//! Types, template parameters and arguments: sections 5.1.5 and 5.1.7 of the ABI.

use super::{Id, List, Node, Parser, Qualifiers};

const BUILTIN: &[(&str, &str)] = &[
    ("v", "void"),
    ("w", "wchar_t"),
    ("b", "bool"),
    ("c", "char"),
    ("a", "signed char"),
    ("h", "unsigned char"),
    ("s", "short"),
    ("t", "unsigned short"),
    ("i", "int"),
    ("j", "unsigned int"),
    ("l", "long"),
    ("m", "unsigned long"),
    ("x", "long long"),
    ("y", "unsigned long long"),
    ("n", "__int128"),
    ("o", "unsigned __int128"),
    ("f", "float"),
    ("d", "double"),
    ("e", "long double"),
    ("g", "__float128"),
    ("z", "..."),
    ("Da", "auto"),
    ("Dc", "decltype(auto)"),
    ("Dd", "decimal64"),
    ("De", "decimal128"),
    ("Df", "decimal32"),
    ("Dh", "half"),
    ("Di", "char32_t"),
    ("Dn", "decltype(nullptr)"),
    ("Ds", "char16_t"),
    ("Du", "char8_t"),
    ("DF16b", "std::bfloat16_t"),
];

impl<'a> Parser<'a> {
    pub(super) fn a_type(&mut self) -> Option<Id> {
        self.nested(Self::type_of_any_kind)
    }

    fn type_of_any_kind(&mut self) -> Option<Id> {
        if let Some((code, name)) = BUILTIN.iter().find(|(code, _)| self.rest().starts_with(code)) {
            self.at += code.len();
            return Some(self.word(name));
        }
        let node = match (self.peek(), self.peek_at(1)) {
            (b'r' | b'V' | b'K', _) => {
                let qualifiers = self.cv_qualifiers();
                if self.begins_function() {
                    self.function_type(qualifiers)?
                } else {
                    Node::Cv(self.a_type()?, qualifiers)
                }
            }
            (b'P', _) => Node::Pointer(self.inner_type()?),
            (b'R', _) => Node::Reference(self.inner_type()?, false),
            (b'O', _) => Node::Reference(self.inner_type()?, true),
            (b'C', _) => Node::Suffixed(self.inner_type()?, "_Complex"),
            (b'G', _) => Node::Suffixed(self.inner_type()?, "_Imaginary"),
            (b'A', _) => self.array()?,
            (b'M', _) => {
                let class = self.inner_type()?;
                Node::MemberPointer(class, self.a_type()?)
            }
            (b'T', b's' | b'u' | b'e') => {
                self.at += 2;
                Node::Alias(self.class_name()?)
            }
            (b'T', _) => {
                let parameter = self.template_parameter()?;
                self.substitutions.push(parameter);
                // After a conversion operator's type come the operator's arguments.
                if self.peek() != b'I' || self.in_conversion {
                    return Some(parameter);
                }
                Node::Template(parameter, self.template_arguments()?)
            }
            (b'S', next) if next != b't' => {
                let known = self.substitution()?;
                if self.peek() != b'I' {
                    return Some(known);
                }
                Node::Template(known, self.template_arguments()?)
            }
            (b'U', next) if !matches!(next, b'l' | b't') => return self.vendor_qualified(),
            (b'u', _) => {
                self.at += 1;
                let name = self.source_name()?;
                if self.peek() == b'I' {
                    Node::Template(name, self.template_arguments()?)
                } else {
                    Node::Alias(name)
                }
            }
            (b'D', b't' | b'T') => Node::Alias(self.decltype()?),
            (b'D', b'p') => {
                self.at += 1;
                Node::Expansion(self.inner_type()?)
            }
            (b'D', b'v') => self.vector()?,
            (b'D', b'k' | b'K') => {
                let text = if self.peek_at(1) == b'k' {
                    " auto"
                } else {
                    " decltype(auto)"
                };
                self.at += 2;
                let parts = [self.class_name()?, self.word(text)];
                return Some(self.sequence(&parts));
            }
            (b'D', b'F') => {
                self.at += 2;
                let bits = self.take_while(|byte| byte.is_ascii_digit());
                let suffix = if self.take("x") { "x" } else { "" };
                if suffix.is_empty() {
                    self.expect("_")?;
                }
                let parts = [self.word("_Float"), self.word(bits), self.word(suffix)];
                return Some(self.sequence(&parts));
            }
            (b'D', b'B' | b'U') => {
                let name = if self.peek_at(1) == b'B' {
                    "_BitInt("
                } else {
                    "unsigned _BitInt("
                };
                self.at += 2;
                let bits = match self.peek() {
                    b'0'..=b'9' => Node::Number(self.number()? as u64),
                    _ => Node::Alias(self.expression()?),
                };
                self.expect("_")?;
                let parts = [self.word(name), self.node(bits), self.word(")")];
                return Some(self.sequence(&parts));
            }
            _ if self.begins_function() => self.function_type(Qualifiers::default())?,
            _ => Node::Alias(self.class_name()?),
        };
        Some(self.substitutable(node))
    }

    /// A type after a letter.
    fn inner_type(&mut self) -> Option<Id> {
        self.at += 1;
        self.a_type()
    }

    pub(super) fn cv_qualifiers(&mut self) -> Qualifiers {
        Qualifiers {
            is_restrict: self.take("r"),
            is_volatile: self.take("V"),
            is_const: self.take("K"),
            reference: "",
        }
    }

    fn begins_function(&self) -> bool {
        self.peek() == b'F' || self.peek() == b'D' && matches!(self.peek_at(1), b'o' | b'O' | b'w' | b'x')
    }

    fn function_type(&mut self, mut qualifiers: Qualifiers) -> Option<Node<'a>> {
        let exceptions = if self.take("Do") {
            Some(self.word(" noexcept"))
        } else if self.take("DO") {
            let parts = [self.word(" noexcept("), self.expression()?, self.word(")")];
            self.expect("E")?;
            Some(self.sequence(&parts))
        } else if self.take("Dw") {
            let types = self.until("E", Self::a_type)?;
            let types = self.list(&types);
            let parts = [self.word(" throw("), self.node(Node::Commas(types)), self.word(")")];
            Some(self.sequence(&parts))
        } else {
            None
        };
        self.take("Dx");
        self.expect("F")?;
        // A function of C.
        self.take("Y");
        let result = Some(self.a_type()?);
        let mut types = Vec::new();
        while !self.take("E") {
            if matches!((self.peek(), self.peek_at(1)), (b'R' | b'O', b'E')) {
                qualifiers.reference = if self.peek() == b'R' { " &" } else { " &&" };
                self.at += 1;
                continue;
            }
            types.push(self.a_type()?);
        }
        Some(Node::Function {
            result,
            parameters: self.parameters(&types),
            qualifiers,
            exceptions,
        })
    }

    fn array(&mut self) -> Option<Node<'a>> {
        self.expect("A")?;
        let length = match self.peek() {
            b'_' => self.word(""),
            b'0'..=b'9' => {
                let digits = self.take_while(|byte| byte.is_ascii_digit());
                self.word(digits)
            }
            _ => self.expression()?,
        };
        self.expect("_")?;
        Some(Node::Array(length, self.a_type()?))
    }

    fn vector(&mut self) -> Option<Node<'a>> {
        self.expect("Dv")?;
        let length = if self.take("_") {
            self.expression()?
        } else {
            let digits = self.take_while(|byte| byte.is_ascii_digit());
            self.word(digits)
        };
        self.expect("_")?;
        let of = if self.take("p") {
            self.word("pixel")
        } else {
            self.a_type()?
        };
        let parts = [of, self.word(" __vector("), length, self.word(")")];
        let parts = self.list(&parts);
        Some(Node::Sequence(parts))
    }

    fn vendor_qualified(&mut self) -> Option<Id> {
        self.expect("U")?;
        let mut qualifier = self.source_name()?;
        if self.peek() == b'I' {
            let arguments = self.template_arguments()?;
            qualifier = self.node(Node::Template(qualifier, arguments));
        }
        let parts = [self.a_type()?, self.word(" "), qualifier];
        let parts = self.list(&parts);
        Some(self.substitutable(Node::Sequence(parts)))
    }

    pub(super) fn decltype(&mut self) -> Option<Id> {
        self.at += 2;
        let parts = [self.word("decltype ("), self.expression()?, self.word(")")];
        self.expect("E")?;
        Some(self.sequence(&parts))
    }

    pub(super) fn template_parameter(&mut self) -> Option<Id> {
        self.expect("T")?;
        // Its level, in lambdas within lambdas.
        if self.take("L") {
            self.counted()?;
        }
        let number = self.counted()?;
        Some(self.node(Node::Parameter(number)))
    }

    pub(super) fn template_arguments(&mut self) -> Option<List> {
        self.expect("I")?;
        let in_conversion = std::mem::take(&mut self.in_conversion);
        let all = self.arguments_until_end();
        self.in_conversion = in_conversion;
        all
    }

    fn arguments_until_end(&mut self) -> Option<List> {
        let mut all = Vec::new();
        while !self.take("E") {
            if self.take("Q") {
                // A constraint is not shown.
                self.expression()?;
            } else {
                all.push(self.template_argument()?);
            }
        }
        Some(self.list(&all))
    }

    pub(super) fn template_argument(&mut self) -> Option<Id> {
        self.nested(|parser| match parser.peek() {
            b'L' => parser.literal(),
            b'X' => {
                parser.at += 1;
                let expression = parser.expression()?;
                parser.expect("E")?;
                Some(expression)
            }
            b'J' => {
                parser.at += 1;
                let all = parser.until("E", Self::template_argument)?;
                let all = parser.list(&all);
                Some(parser.node(Node::Pack(all)))
            }
            b'T' if parser.is_parameter_declaration() => {
                parser.parameter_declaration()?;
                parser.template_argument()
            }
            _ => parser.a_type(),
        })
    }
}
