//! Writes a tree. Types of C++ are written around what they qualify: each has a left and a right part.

use super::{Id, List, Node, Qualifiers, Tree};

/// Maximum number of nodes written: substitutions can double a short name at each step, also into nothing.
const MAX_NODES: u32 = 1 << 16;
/// Maximum nesting of nodes. Each level uses stack.
const MAX_NESTING: u32 = 400;

/// The text of a tree, unless it has more than `max` bytes or exceeds a bound.
pub fn text(tree: &Tree<'_>, id: Id, max: usize) -> Option<String> {
    let mut printer = Printer {
        tree,
        out: String::new(),
        max,
        nodes: 0,
        nesting: 0,
        scopes: Vec::new(),
        scope: None,
        pack: None,
        in_local: false,
    };
    printer.whole(id)?;
    Some(printer.out)
}

/// The element of packs that an expansion writes now.
#[derive(Clone, Copy)]
struct PackElement {
    index: usize,
    /// The number of elements, when a pack was met.
    length: Option<usize>,
}

/// What template parameters stand for.
#[derive(Clone, Copy)]
enum Parameters {
    /// The arguments of a template.
    Arguments(List),
    /// The names that a lambda declares; without any, each is an `auto`.
    Lambda(List),
}

/// Parameters, and the index of the scope that their arguments are in.
#[derive(Clone, Copy)]
struct Scope {
    parameters: Parameters,
    outer: Option<usize>,
}

/// Writes one tree. Functions return `None` if it exceeds a bound or does not say what a parameter stands for; the printer
/// is of no use then.
struct Printer<'t, 'a> {
    tree: &'t Tree<'a>,
    out: String,
    max: usize,
    nodes: u32,
    nesting: u32,
    scopes: Vec<Scope>,
    /// The index of the innermost one.
    scope: Option<usize>,
    pack: Option<PackElement>,
    /// The function of a local name: its result is not written.
    in_local: bool,
}

/// The parts of a node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

impl<'a> Printer<'_, 'a> {
    fn put(&mut self, text: &str) -> Option<()> {
        if self.out.len() + text.len() > self.max {
            return None;
        }
        self.out.push_str(text);
        Some(())
    }

    fn whole(&mut self, id: Id) -> Option<()> {
        self.side(id, Side::Left)?;
        self.side(id, Side::Right)
    }

    fn side(&mut self, id: Id, side: Side) -> Option<()> {
        self.nodes += 1;
        if self.nodes > MAX_NODES || self.nesting >= MAX_NESTING {
            return None;
        }
        self.nesting += 1;
        let node = self.tree.get(id)?;
        match side {
            Side::Left => self.left(node),
            Side::Right => self.right(node),
        }?;
        self.nesting -= 1;
        Some(())
    }

    fn commas(&mut self, list: List) -> Option<()> {
        let start = self.out.len();
        for id in self.tree.list(list) {
            let before = self.out.len();
            if before > start {
                self.put(", ")?;
            }
            let with_comma = self.out.len();
            self.whole(*id)?;
            // An empty pack.
            if self.out.len() == with_comma {
                self.out.truncate(before);
            }
        }
        Some(())
    }

    fn left(&mut self, node: Node<'a>) -> Option<()> {
        match node {
            Node::Text(text) | Node::Standard(text, _) => self.put(text),
            Node::Number(number) => self.put(&number.to_string()),
            Node::Sequence(list) | Node::Operation(list) => {
                let parts = self.tree.list(list);
                parts.iter().try_for_each(|part| self.whole(*part))
            }
            Node::Operand(of) => match self.resolved(of)? {
                Node::Operation(_) => {
                    self.put("(")?;
                    self.whole(of)?;
                    self.put(")")
                }
                _ => self.whole(of),
            },
            Node::Commas(list) => self.commas(list),
            Node::Scoped(scope, name) => {
                self.whole(scope)?;
                self.put("::")?;
                self.whole(name)
            }
            Node::Local(function, entity) => {
                let outer = std::mem::replace(&mut self.in_local, true);
                self.whole(function)?;
                self.in_local = outer;
                self.put("::")?;
                self.whole(entity)
            }
            Node::Template(name, arguments) => self.template(name, arguments),
            Node::Tagged(name, tag) => {
                self.whole(name)?;
                self.put("[abi:")?;
                self.put(tag)?;
                self.put("]")
            }
            Node::Base(scope) => self.base(scope),
            Node::Parameter(number) => self.parameter(number, Side::Left),
            Node::Pack(list) => self.commas(list),
            Node::Lambda {
                declarations,
                declared,
                parameters,
                number,
            } => self.lambda(declarations, declared, parameters, number),
            Node::Expansion(of) => self.expansion(of),
            Node::Alias(of) => self.side(of, Side::Left),
            Node::Cv(of, qualifiers) => {
                self.side(of, Side::Left)?;
                // Those of a function follow its parameters.
                match self.resolved(of)? {
                    Node::Function { .. } => Some(()),
                    _ => self.qualifiers(qualifiers),
                }
            }
            Node::Pointer(of) => self.modified(of, "*"),
            Node::Reference(of, is_rvalue) => self.reference(of, is_rvalue, Side::Left),
            Node::Array(_, of) => self.side(of, Side::Left),
            Node::MemberPointer(class, of) => {
                self.modified(of, "")?;
                if !self.out.ends_with('(') {
                    self.put(" ")?;
                }
                self.whole(class)?;
                self.put("::*")
            }
            Node::Function { result, .. } => match result {
                Some(result) => {
                    self.side(result, Side::Left)?;
                    self.put(" ")
                }
                None => Some(()),
            },
            Node::Encoding { .. } => self.encoding(node),
            Node::Suffixed(of, text) => {
                self.whole(of)?;
                self.put(" ")?;
                self.put(text)
            }
        }
    }

    fn right(&mut self, node: Node<'a>) -> Option<()> {
        match node {
            Node::Alias(of) => self.side(of, Side::Right),
            Node::Cv(of, qualifiers) => {
                self.side(of, Side::Right)?;
                match self.resolved(of)? {
                    Node::Function { .. } => self.qualifiers(qualifiers),
                    _ => Some(()),
                }
            }
            Node::Parameter(number) => self.parameter(number, Side::Right),
            Node::Pointer(of) | Node::MemberPointer(_, of) => self.after_modified(of),
            Node::Reference(of, is_rvalue) => self.reference(of, is_rvalue, Side::Right),
            Node::Array(length, of) => {
                if !self.out.ends_with(']') {
                    self.put(" ")?;
                }
                self.put("[")?;
                self.whole(length)?;
                self.put("]")?;
                self.side(of, Side::Right)
            }
            Node::Function {
                result,
                parameters,
                qualifiers,
                exceptions,
            } => {
                self.put("(")?;
                self.commas(parameters)?;
                self.put(")")?;
                self.qualifiers(qualifiers)?;
                if let Some(exceptions) = exceptions {
                    self.whole(exceptions)?;
                }
                result.map_or(Some(()), |result| self.side(result, Side::Right))
            }
            _ => Some(()),
        }
    }

    /// The left part of a pointer or reference to a type.
    fn modified(&mut self, of: Id, mark: &str) -> Option<()> {
        self.side(of, Side::Left)?;
        match self.resolved(of)? {
            Node::Array(..) => self.put(" (")?,
            Node::Function { .. } => self.put("(")?,
            _ => {}
        }
        self.put(mark)
    }

    fn after_modified(&mut self, of: Id) -> Option<()> {
        if matches!(self.resolved(of)?, Node::Array(..) | Node::Function { .. }) {
            self.put(")")?;
        }
        self.side(of, Side::Right)
    }

    fn qualifiers(&mut self, qualifiers: Qualifiers) -> Option<()> {
        for (is_set, text) in [
            (qualifiers.is_const, " const"),
            (qualifiers.is_volatile, " volatile"),
            (qualifiers.is_restrict, " restrict"),
        ] {
            if is_set {
                self.put(text)?;
            }
        }
        self.put(qualifiers.reference)
    }

    fn template(&mut self, name: Id, arguments: List) -> Option<()> {
        // Expressions and results within are those of other functions.
        let in_local = std::mem::take(&mut self.in_local);
        self.whole(name)?;
        // `operator<` and its arguments.
        if self.out.ends_with('<') {
            self.put(" ")?;
        }
        self.put("<")?;
        self.commas(arguments)?;
        if self.out.ends_with('>') {
            self.put(" ")?;
        }
        self.in_local = in_local;
        self.put(">")
    }

    /// The last name of a scope.
    fn base(&mut self, mut scope: Id) -> Option<()> {
        for _ in 0..MAX_NESTING {
            scope = match self.tree.get(scope)? {
                Node::Scoped(_, name) | Node::Local(_, name) => name,
                Node::Template(name, _) | Node::Tagged(name, _) | Node::Alias(name) => name,
                Node::Standard(_, base) => return self.put(base),
                _ => return self.whole(scope),
            };
        }
        None
    }

    fn encoding(&mut self, node: Node<'a>) -> Option<()> {
        let Node::Encoding {
            name,
            result,
            parameters,
            qualifiers,
            constraint,
        } = node
        else {
            return None;
        };
        let result = result.filter(|_| !self.in_local);
        let in_local = std::mem::take(&mut self.in_local);
        let scope = self.scope;
        if let Some(arguments) = self.arguments_of(name)? {
            self.enter(Parameters::Arguments(arguments));
        }
        if let Some(result) = result {
            self.side(result, Side::Left)?;
            self.put(" ")?;
        }
        self.whole(name)?;
        self.put("(")?;
        self.commas(parameters)?;
        self.put(")")?;
        self.qualifiers(qualifiers)?;
        if let Some(result) = result {
            self.side(result, Side::Right)?;
        }
        if let Some(constraint) = constraint {
            self.put(" requires ")?;
            self.whole(constraint)?;
        }
        self.leave(scope);
        self.in_local = in_local;
        Some(())
    }

    /// The arguments that parameters in a function's types refer to: the last ones in its name.
    fn arguments_of(&self, mut name: Id) -> Option<Option<List>> {
        for _ in 0..MAX_NESTING {
            name = match self.tree.get(name)? {
                Node::Template(_, arguments) => return Some(Some(arguments)),
                Node::Local(_, entity) => entity,
                Node::Tagged(name, _) | Node::Alias(name) => name,
                // A member of a class template.
                Node::Scoped(scope, name) => match self.tree.get(name)? {
                    Node::Template(..) | Node::Local(..) | Node::Scoped(..) => name,
                    _ => scope,
                },
                _ => return Some(None),
            };
        }
        None
    }

    fn enter(&mut self, parameters: Parameters) {
        let outer = self.scope;
        self.scope = Some(self.scopes.len());
        self.scopes.push(Scope { parameters, outer });
    }

    /// Returns to a scope, from the one that was entered last.
    fn leave(&mut self, scope: Option<usize>) {
        if self.scope != scope {
            self.scopes.pop();
        }
        self.scope = scope;
    }

    fn lambda(&mut self, declarations: List, declared: List, parameters: List, number: u64) -> Option<()> {
        self.put("{lambda")?;
        let (scope, pack, in_local) = (self.scope, self.pack.take(), std::mem::take(&mut self.in_local));
        self.enter(Parameters::Lambda(declared));
        if !self.tree.list(declarations).is_empty() {
            self.put("<")?;
            self.commas(declarations)?;
            self.put(">")?;
        }
        self.put("(")?;
        self.commas(parameters)?;
        self.leave(scope);
        (self.pack, self.in_local) = (pack, in_local);
        self.put(")#")?;
        self.put(&number.to_string())?;
        self.put("}")
    }

    /// What a parameter stands for here, and the scope of that: of a pack the element that is written now.
    fn argument(&mut self, number: usize) -> Option<Argument> {
        let scope = *self.scopes.get(self.scope?)?;
        let arguments = match scope.parameters {
            Parameters::Arguments(arguments) => arguments,
            Parameters::Lambda(declared) => {
                let name = self.tree.list(declared).get(number);
                return Some(name.map_or(Argument::Auto, |name| Argument::Node(*name, scope.outer)));
            }
        };
        let argument = *self.tree.list(arguments).get(number)?;
        if let (Some(Node::Pack(list)), Some(pack)) = (self.tree.get(argument), &mut self.pack) {
            let elements = self.tree.list(list);
            pack.length = Some(pack.length.unwrap_or(0).max(elements.len()));
            let element = elements.get(pack.index);
            return Some(element.map_or(Argument::None, |element| Argument::Node(*element, scope.outer)));
        }
        Some(Argument::Node(argument, scope.outer))
    }

    fn parameter(&mut self, number: usize, side: Side) -> Option<()> {
        match self.argument(number)? {
            Argument::None => Some(()),
            Argument::Auto if side == Side::Right => Some(()),
            Argument::Auto => {
                self.put("auto:")?;
                self.put(&(number as u64 + 1).to_string())
            }
            Argument::Node(id, scope) => self.elsewhere(scope, |printer| printer.side(id, side)),
        }
    }

    /// Writes something of another scope, which is not an element of a pack there.
    fn elsewhere(&mut self, scope: Option<usize>, write: impl FnOnce(&mut Self) -> Option<()>) -> Option<()> {
        let (here, pack) = (std::mem::replace(&mut self.scope, scope), self.pack.take());
        write(self)?;
        (self.scope, self.pack) = (here, pack);
        Some(())
    }

    fn expansion(&mut self, of: Id) -> Option<()> {
        let outer = self.pack.take();
        let start = self.out.len();
        let (mut index, mut length) = (0, 1);
        while index < length {
            let before = self.out.len();
            if before > start {
                self.put(", ")?;
            }
            let with_comma = self.out.len();
            self.pack = Some(PackElement { index, length: None });
            self.whole(of)?;
            match self.pack.and_then(|pack| pack.length) {
                // The pack is that of a lambda or another function.
                None => {
                    self.put("...")?;
                    break;
                }
                Some(0) => {
                    self.out.truncate(start);
                    break;
                }
                Some(found) => length = found,
            }
            if self.out.len() == with_comma {
                self.out.truncate(before);
            }
            index += 1;
        }
        self.pack = outer;
        Some(())
    }

    /// What a node stands for.
    fn resolved(&mut self, id: Id) -> Option<Node<'a>> {
        let (scope, pack) = (self.scope, self.pack);
        let mut next = Some(id);
        let mut found = None;
        for _ in 0..MAX_NESTING {
            let Some(id) = next else { break };
            let node = self.tree.get(id)?;
            found = Some(node);
            next = match node {
                Node::Alias(of) => Some(of),
                Node::Parameter(number) => match self.argument(number)? {
                    Argument::Node(id, outer) => {
                        (self.scope, self.pack) = (outer, None);
                        Some(id)
                    }
                    _ => None,
                },
                // What is around it is the same for qualified types.
                Node::Cv(of, _) => Some(of),
                _ => None,
            };
        }
        (self.scope, self.pack) = (scope, pack);
        found.filter(|_| next.is_none())
    }

    /// A reference to a reference is one reference, an rvalue reference only if both are.
    fn reference(&mut self, mut of: Id, mut is_rvalue: bool, side: Side) -> Option<()> {
        for _ in 0..MAX_NESTING {
            of = match self.tree.get(of)? {
                Node::Alias(inner) => inner,
                Node::Parameter(number) => match self.argument(number)? {
                    Argument::Node(inner, scope) => {
                        return self.elsewhere(scope, |printer| printer.reference(inner, is_rvalue, side));
                    }
                    Argument::None => return Some(()),
                    Argument::Auto => break,
                },
                Node::Reference(inner, inner_is_rvalue) => {
                    is_rvalue &= inner_is_rvalue;
                    inner
                }
                _ => break,
            };
        }
        match side {
            Side::Left => self.modified(of, if is_rvalue { "&&" } else { "&" }),
            Side::Right => self.after_modified(of),
        }
    }
}

/// What a template parameter stands for.
enum Argument {
    /// A node, and its scope.
    Node(Id, Option<usize>),
    /// The `auto` of a lambda.
    Auto,
    /// A pack has no such element.
    None,
}
