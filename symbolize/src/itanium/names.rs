//! Names of functions, variables and classes: sections 5.1.2, 5.1.3, 5.1.4, 5.1.6 and 5.1.10 of the ABI.

use super::{Id, List, Node, Parser, Qualifiers};

/// A name, and what is to be known of it to read the rest.
#[derive(Clone, Copy)]
pub(super) struct Name {
    id: Id,
    /// A function of this name has its result in front of its parameters.
    has_result: bool,
    qualifiers: Qualifiers,
}

/// Operators: their code, text, and number of operands in an expression.
pub(super) const OPERATORS: &[(&str, &str, u8)] = &[
    ("aN", "&=", 2),
    ("aS", "=", 2),
    ("aa", "&&", 2),
    ("ad", "&", 1),
    ("an", "&", 2),
    ("aw", "co_await ", 1),
    ("cl", "()", 0),
    ("cm", ",", 2),
    ("co", "~", 1),
    ("dV", "/=", 2),
    ("da", "delete[] ", 1),
    ("de", "*", 1),
    ("dl", "delete ", 1),
    ("ds", ".*", 2),
    ("dv", "/", 2),
    ("eO", "^=", 2),
    ("eo", "^", 2),
    ("eq", "==", 2),
    ("ge", ">=", 2),
    ("gt", ">", 2),
    ("ix", "[]", 0),
    ("lS", "<<=", 2),
    ("le", "<=", 2),
    ("ls", "<<", 2),
    ("lt", "<", 2),
    ("mI", "-=", 2),
    ("mL", "*=", 2),
    ("mi", "-", 2),
    ("ml", "*", 2),
    ("mm", "--", 1),
    ("na", "new[]", 0),
    ("ne", "!=", 2),
    ("ng", "-", 1),
    ("nt", "!", 1),
    ("nw", "new", 0),
    ("oR", "|=", 2),
    ("oo", "||", 2),
    ("or", "|", 2),
    ("pL", "+=", 2),
    ("pl", "+", 2),
    ("pm", "->*", 2),
    ("pp", "++", 1),
    ("ps", "+", 1),
    ("pt", "->", 0),
    ("qu", "?", 0),
    ("rM", "%=", 2),
    ("rS", ">>=", 2),
    ("rm", "%", 2),
    ("rs", ">>", 2),
    ("ss", "<=>", 2),
];

impl<'a> Parser<'a> {
    /// The whole name, after `_Z`. What compilers append after a dot is shown as such.
    pub(super) fn mangled_name(&mut self) -> Option<Id> {
        let name = self.encoding()?;
        let rest = self.rest();
        match rest.as_bytes().first() {
            None => Some(name),
            Some(b'.') => {
                let parts = [name, self.word(" [clone "), self.word(rest), self.word("]")];
                Some(self.sequence(&parts))
            }
            _ => None,
        }
    }

    pub(super) fn encoding(&mut self) -> Option<Id> {
        self.nested(|parser| {
            if matches!(parser.peek(), b'T' | b'G') {
                return parser.special_name();
            }
            let in_conversion = std::mem::take(&mut parser.in_conversion);
            let encoding = parser.function_or_data();
            parser.in_conversion = in_conversion;
            encoding
        })
    }

    fn ends_encoding(&self) -> bool {
        matches!(self.peek(), 0 | b'E' | b'.' | b'_')
    }

    fn function_or_data(&mut self) -> Option<Id> {
        let name = self.name()?;
        if self.ends_encoding() {
            return Some(name.id);
        }
        let result = if name.has_result { Some(self.a_type()?) } else { None };
        let mut parameters = Vec::new();
        let mut constraint = None;
        while !self.ends_encoding() {
            if self.take("Q") {
                constraint = Some(self.expression()?);
                break;
            }
            parameters.push(self.a_type()?);
        }
        let parameters = self.parameters(&parameters);
        Some(self.node(Node::Encoding {
            name: name.id,
            result,
            parameters,
            qualifiers: name.qualifiers,
            constraint,
        }))
    }

    /// The list of these types; a single `void` is none.
    pub(super) fn parameters(&mut self, types: &[Id]) -> List {
        match types {
            [one] if matches!(self.tree.get(*one), Some(Node::Text("void"))) => List::default(),
            _ => self.list(types),
        }
    }

    fn special_name(&mut self) -> Option<Id> {
        let of = |parser: &mut Self, text: &'a str, id: Id| {
            let parts = [parser.word(text), id];
            Some(parser.sequence(&parts))
        };
        for (code, text) in [
            ("TV", "vtable for "),
            ("TT", "VTT for "),
            ("TI", "typeinfo for "),
            ("TS", "typeinfo name for "),
        ] {
            if self.take(code) {
                let class = self.a_type()?;
                return of(self, text, class);
            }
        }
        for (code, text) in [
            ("TW", "TLS wrapper function for "),
            ("TH", "TLS init function for "),
            ("GV", "guard variable for "),
        ] {
            if self.take(code) {
                let name = self.name()?.id;
                return of(self, text, name);
            }
        }
        if self.take("TA") {
            let argument = self.template_argument()?;
            return of(self, "template parameter object for ", argument);
        }
        if self.take("GR") {
            let name = self.name()?.id;
            let number = self.sequence_number()?;
            let parts = [
                self.word("reference temporary #"),
                self.node(Node::Number(number as u64)),
                self.word(" for "),
                name,
            ];
            return Some(self.sequence(&parts));
        }
        for (code, text) in [("GTt", "transaction clone for "), ("GTn", "non-transaction clone for ")] {
            if self.take(code) {
                let function = self.encoding()?;
                return of(self, text, function);
            }
        }
        if self.take("TC") {
            let class = self.a_type()?;
            self.number()?;
            self.expect("_")?;
            let base = self.a_type()?;
            let parts = [self.word("construction vtable for "), base, self.word("-in-"), class];
            return Some(self.sequence(&parts));
        }
        let text = match (self.take("T"), self.peek()) {
            (true, b'h') => "non-virtual thunk to ",
            (true, b'v') => "virtual thunk to ",
            (true, b'c') => {
                self.at += 1;
                self.call_offset()?;
                "covariant return thunk to "
            }
            _ => return None,
        };
        self.call_offset()?;
        let function = self.encoding()?;
        of(self, text, function)
    }

    fn call_offset(&mut self) -> Option<()> {
        let is_virtual = match (self.take("h"), self.take("v")) {
            (false, false) => return None,
            (_, is_virtual) => is_virtual,
        };
        for _ in 0..=usize::from(is_virtual) {
            self.take("n");
            self.number()?;
            self.expect("_")?;
        }
        Some(())
    }

    fn name(&mut self) -> Option<Name> {
        self.nested(|parser| match (parser.peek(), parser.peek_at(1)) {
            (b'N', _) => parser.nested_name(),
            (b'Z', _) => parser.local_name(),
            (b'S', next) if next != b't' => {
                let template = parser.substitution()?;
                let arguments = parser.template_arguments()?;
                Some(Name {
                    id: parser.node(Node::Template(template, arguments)),
                    has_result: true,
                    qualifiers: Qualifiers::default(),
                })
            }
            _ => parser.unscoped_name(),
        })
    }

    /// The name of a class or an enumeration.
    pub(super) fn class_name(&mut self) -> Option<Id> {
        self.name().map(|name| name.id)
    }

    fn unscoped_name(&mut self) -> Option<Name> {
        let scope = self.take("St").then(|| self.word("std"));
        let (name, mut has_result) = self.unqualified_name(scope)?;
        let mut id = scope.map_or(name, |scope| self.node(Node::Scoped(scope, name)));
        if self.peek() == b'I' {
            self.substitutions.push(id);
            let arguments = self.template_arguments()?;
            id = self.node(Node::Template(id, arguments));
        } else {
            has_result = false;
        }
        Some(Name {
            id,
            has_result,
            qualifiers: Qualifiers::default(),
        })
    }

    fn nested_name(&mut self) -> Option<Name> {
        self.expect("N")?;
        // A function with an explicit object parameter.
        self.take("H");
        let mut qualifiers = self.cv_qualifiers();
        qualifiers.reference = match () {
            () if self.take("R") => " &",
            () if self.take("O") => " &&",
            () => "",
        };
        let mut scope: Option<Id> = None;
        // Could the last part have a result, and does it have arguments?
        let (mut may_have_result, mut has_arguments) = (true, false);
        let mut is_substitution = false;
        while !self.take("E") {
            (has_arguments, is_substitution) = match (self.peek(), self.peek_at(1)) {
                (b'I', _) => {
                    let arguments = self.template_arguments()?;
                    scope = Some(self.node(Node::Template(scope?, arguments)));
                    (true, false)
                }
                (b'T', _) if scope.is_none() => {
                    scope = Some(self.template_parameter()?);
                    (false, false)
                }
                (b'D', b't' | b'T') if scope.is_none() => {
                    scope = Some(self.decltype()?);
                    (false, false)
                }
                (b'S', b't') if scope.is_none() => {
                    self.at += 2;
                    scope = Some(self.word("std"));
                    (false, true)
                }
                (b'S', _) if scope.is_none() => {
                    scope = Some(self.substitution()?);
                    (false, true)
                }
                // The scope of a lambda that initializes a member.
                (b'M', _) if scope.is_some() => {
                    self.at += 1;
                    continue;
                }
                _ => {
                    let name;
                    (name, may_have_result) = self.unqualified_name(scope)?;
                    scope = Some(scope.map_or(name, |scope| self.node(Node::Scoped(scope, name))));
                    (false, false)
                }
            };
            if !is_substitution {
                self.substitutions.push(scope?);
            }
        }
        if !is_substitution {
            // The whole is one only as a type.
            self.substitutions.pop();
        }
        Some(Name {
            id: scope?,
            has_result: has_arguments && may_have_result,
            qualifiers,
        })
    }

    fn local_name(&mut self) -> Option<Name> {
        self.expect("Z")?;
        let function = self.encoding()?;
        self.expect("E")?;
        if self.take("s") {
            self.discriminator();
            let text = self.word("string literal");
            return Some(Name {
                id: self.node(Node::Local(function, text)),
                has_result: false,
                qualifiers: Qualifiers::default(),
            });
        }
        let default = if self.take("d") {
            let number = self.counted()?;
            let parts = [
                self.word("{default arg#"),
                self.node(Node::Number(number as u64 + 1)),
                self.word("}"),
            ];
            Some(self.sequence(&parts))
        } else {
            None
        };
        let mut name = self.name()?;
        self.discriminator();
        if let Some(default) = default {
            name.id = self.node(Node::Scoped(default, name.id));
        }
        name.id = self.node(Node::Local(function, name.id));
        Some(name)
    }

    /// What tells entities of one name apart; it is not shown.
    fn discriminator(&mut self) {
        if self.take("__") {
            self.number();
            self.take("_");
        } else if self.peek() == b'_' && self.peek_at(1).is_ascii_digit() {
            self.at += 2;
        }
    }

    /// A name in a scope, and whether a function of this name can have a result.
    fn unqualified_name(&mut self, scope: Option<Id>) -> Option<(Id, bool)> {
        let module = self.module_name()?;
        // A friend, and internal linkage.
        self.take("F");
        self.take("L");
        let mut may_have_result = true;
        let mut id = match (self.peek(), self.peek_at(1)) {
            (b'0'..=b'9', _) => self.source_name()?,
            (b'U', b'l') => self.lambda()?,
            (b'U', b't') => {
                self.at += 2;
                let number = self.counted()? as u64 + 1;
                let parts = [
                    self.word("{unnamed type#"),
                    self.node(Node::Number(number)),
                    self.word("}"),
                ];
                self.sequence(&parts)
            }
            (b'C', b'1'..=b'5' | b'I') => {
                may_have_result = false;
                self.at += 1;
                let is_inherited = self.take("I");
                self.at += 1;
                if is_inherited {
                    self.a_type()?;
                }
                self.node(Node::Base(scope?))
            }
            (b'D', b'0'..=b'5') => {
                may_have_result = false;
                self.at += 2;
                let parts = [self.word("~"), self.node(Node::Base(scope?))];
                self.sequence(&parts)
            }
            (b'D', b'C') => {
                self.at += 2;
                let names = self.until("E", Self::source_name)?;
                let names = self.list(&names);
                let parts = [self.word("["), self.node(Node::Commas(names)), self.word("]")];
                self.sequence(&parts)
            }
            (b'c', b'v') => {
                may_have_result = false;
                self.conversion()?
            }
            _ => self.operator_name()?,
        };
        while self.take("B") {
            let length = self.number()?;
            let tag = self.text.get(self.at..self.at.checked_add(length)?)?;
            self.at += length;
            id = self.node(Node::Tagged(id, tag));
        }
        if let Some(module) = module {
            let parts = [id, self.word("@"), module];
            id = self.sequence(&parts);
        }
        Some((id, may_have_result))
    }

    /// The module of C++20 that what follows is in: `Some(None)` for none.
    fn module_name(&mut self) -> Option<Option<Id>> {
        let mut module = None;
        while self.take("W") {
            let separator = if self.take("P") { ":" } else { "." };
            let part = self.source_name()?;
            let whole = match module {
                None => part,
                Some(outer) => {
                    let parts = [outer, self.word(separator), part];
                    self.sequence(&parts)
                }
            };
            self.substitutions.push(whole);
            module = Some(whole);
        }
        Some(module)
    }

    fn conversion(&mut self) -> Option<Id> {
        self.expect("cv")?;
        let in_conversion = std::mem::replace(&mut self.in_conversion, true);
        let to = self.a_type();
        self.in_conversion = in_conversion;
        let parts = [self.word("operator "), to?];
        Some(self.sequence(&parts))
    }

    pub(super) fn operator_name(&mut self) -> Option<Id> {
        if self.take("li") {
            let parts = [self.word("operator\"\" "), self.source_name()?];
            return Some(self.sequence(&parts));
        }
        let code = self.rest().get(..2)?;
        let (_, text, _) = OPERATORS.iter().find(|(known, ..)| *known == code)?;
        self.at += 2;
        let is_word = text.starts_with(|c: char| c.is_ascii_alphabetic());
        let parts = [
            self.word(if is_word { "operator " } else { "operator" }),
            self.word(text.trim_end()),
        ];
        Some(self.sequence(&parts))
    }

    pub(super) fn source_name(&mut self) -> Option<Id> {
        let length = self.number()?;
        let name = self.text.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        // GCC's name of a namespace without one: `_GLOBAL_`, a separator, `N`.
        let is_anonymous = ["_GLOBAL__N", "_GLOBAL_.N", "_GLOBAL_$N"]
            .iter()
            .any(|start| name.starts_with(start));
        Some(self.word(if is_anonymous { "(anonymous namespace)" } else { name }))
    }

    fn lambda(&mut self) -> Option<Id> {
        self.expect("Ul")?;
        let declared = std::mem::take(&mut self.declared);
        let in_conversion = std::mem::take(&mut self.in_conversion);
        let lambda = self.closure();
        self.declared = declared;
        self.in_conversion = in_conversion;
        lambda
    }

    fn closure(&mut self) -> Option<Id> {
        let mut declarations = Vec::new();
        while self.is_parameter_declaration() {
            declarations.push(self.parameter_declaration()?);
        }
        let mut types = Vec::new();
        while !self.take("E") {
            if self.take("Q") {
                // Constraints are not shown.
                self.expression()?;
            } else {
                types.push(self.a_type()?);
            }
        }
        let declared = std::mem::take(&mut self.declared);
        let lambda = Node::Lambda {
            declarations: self.list(&declarations),
            declared: self.list(&declared),
            parameters: self.parameters(&types),
            number: self.counted()? as u64 + 1,
        };
        Some(self.node(lambda))
    }

    pub(super) fn is_parameter_declaration(&self) -> bool {
        self.peek() == b'T' && matches!(self.peek_at(1), b'y' | b'n' | b't' | b'p' | b'k')
    }

    /// The declaration of a template parameter.
    pub(super) fn parameter_declaration(&mut self) -> Option<Id> {
        self.nested(|parser| {
            parser.expect("T")?;
            let kind = parser.peek();
            parser.at += 1;
            let number = parser.declared.len() as u64;
            let number = parser.node(Node::Number(number));
            let mut parts = Vec::new();
            let name = match kind {
                b'y' => {
                    parts.push(parser.word("typename "));
                    "$T"
                }
                b'k' => {
                    let concept = parser.class_name()?;
                    parts.extend([concept, parser.word(" ")]);
                    "$T"
                }
                b'n' => {
                    parts.extend([parser.a_type()?, parser.word(" ")]);
                    "$N"
                }
                b't' => {
                    let inner = parser.until("E", Self::parameter_declaration)?;
                    let inner = parser.list(&inner);
                    parts.extend([
                        parser.word("template<"),
                        parser.node(Node::Commas(inner)),
                        parser.word("> class "),
                    ]);
                    "$TT"
                }
                b'p' => {
                    let of = parser.parameter_declaration()?;
                    let parts = [of, parser.word("...")];
                    return Some(parser.sequence(&parts));
                }
                _ => return None,
            };
            let name = [parser.word(name), number];
            let name = parser.sequence(&name);
            parser.declared.push(name);
            parts.push(name);
            Some(parser.sequence(&parts))
        })
    }

    /// Base 36, and `_`; nothing before it is 0.
    fn sequence_number(&mut self) -> Option<usize> {
        let digits = self.take_while(|byte| byte.is_ascii_digit() || byte.is_ascii_uppercase());
        self.expect("_")?;
        match digits {
            "" => Some(0),
            _ => usize::from_str_radix(digits, 36).ok()?.checked_add(1),
        }
    }

    /// What stands for something earlier, or for a name of the standard library.
    pub(super) fn substitution(&mut self) -> Option<Id> {
        self.expect("S")?;
        let kind = self.peek();
        if matches!(kind, b'_' | b'0'..=b'9' | b'A'..=b'Z') {
            let number = self.sequence_number()?;
            return self.substitutions.get(number).copied();
        }
        self.at += 1;
        // Constructors have the name of the class, not of the abbreviation.
        let is_constructor = matches!(self.peek(), b'C' | b'D');
        let (short, full, base) = match kind {
            b'a' => ("std::allocator", "std::allocator", "allocator"),
            b'b' => ("std::basic_string", "std::basic_string", "basic_string"),
            b's' => (
                "std::string",
                "std::basic_string<char, std::char_traits<char>, std::allocator<char> >",
                "basic_string",
            ),
            b'i' => (
                "std::istream",
                "std::basic_istream<char, std::char_traits<char> >",
                "basic_istream",
            ),
            b'o' => (
                "std::ostream",
                "std::basic_ostream<char, std::char_traits<char> >",
                "basic_ostream",
            ),
            b'd' => (
                "std::iostream",
                "std::basic_iostream<char, std::char_traits<char> >",
                "basic_iostream",
            ),
            _ => return None,
        };
        let mut id = self.node(Node::Standard(if is_constructor { full } else { short }, base));
        while self.take("B") {
            let length = self.number()?;
            let tag = self.text.get(self.at..self.at.checked_add(length)?)?;
            self.at += length;
            id = self.substitutable(Node::Tagged(id, tag));
        }
        Some(id)
    }
}
