//! A document as a tree, so that a part of it can be changed and the rest stays as somebody wrote it.
//!
//! Text and values of attributes are kept escaped, as they stand in the document. Must never: follow an entity of the document's
//! own (there is no way here to say what one stands for). Failure story: what is no XML is an error with its place.

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use std::fmt::Write;

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// An element.
    Element(Element),
    /// Text, a comment, a declaration: as it was written.
    Other(String),
}

/// An element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// With its prefix.
    pub name: String,
    /// Names and values, the values escaped.
    attributes: Vec<(String, String)>,
    /// What is in it.
    pub children: Vec<Node>,
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;").replace('"', "&quot;")
}

fn unescaped(text: &str) -> String {
    quick_xml::escape::unescape(text).map_or_else(|_| text.to_owned(), |text| text.into_owned())
}

fn element(start: &BytesStart<'_>) -> Result<Element, String> {
    let mut element = Element { name: start.name().as_ref().to_owned(), ..Element::default() };
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|error| format!("{}: {error}", element.name))?;
        element.attributes.push((attribute.key.as_ref().to_owned(), attribute.value.into_owned()));
    }
    Ok(element)
}

/// Reads a document: its one element; what is around it is let go.
///
/// # Errors
/// A sentence about what is no XML, and where.
pub fn parse(document: &str) -> Result<Element, String> {
    let mut reader = Reader::from_str(document);
    let mut open: Vec<Element> = Vec::new();
    loop {
        let from = reader.buffer_position();
        let of = |error: String| format!("this is no XML: at byte {from}: {error}");
        let event = reader.read_event().map_err(|error| of(error.to_string()))?;
        let raw = document.get(from as usize..reader.buffer_position() as usize).unwrap_or_default();
        let closed = match event {
            Event::Eof => return Err(of("the document ends before its element does".to_owned())),
            Event::Start(start) => {
                open.push(element(&start).map_err(of)?);
                continue;
            }
            Event::Empty(start) => element(&start).map_err(of)?,
            Event::End(_) => open.pop().ok_or_else(|| of("an end without a beginning".to_owned()))?,
            _ => {
                if let Some(parent) = open.last_mut() {
                    parent.children.push(Node::Other(raw.to_owned()));
                }
                continue;
            }
        };
        match open.last_mut() {
            Some(parent) => parent.children.push(Node::Element(closed)),
            None => return Ok(closed),
        }
    }
}

impl Element {
    /// One with attributes.
    pub fn new(name: &str, attributes: &[(&str, &str)]) -> Self {
        let mut element = Element { name: name.to_owned(), ..Element::default() };
        attributes.iter().for_each(|(name, value)| element.set(name, value));
        element
    }

    /// The same with this text in it.
    pub fn with_text(mut self, text: &str) -> Self {
        self.children.push(Node::Other(escaped(text)));
        self
    }

    /// The same with something in it.
    #[must_use]
    pub fn with(mut self, child: Element) -> Self {
        self.children.push(Node::Element(child));
        self
    }

    /// An attribute.
    pub fn get(&self, name: &str) -> Option<String> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| unescaped(value))
    }

    /// Changes an attribute, or adds it.
    pub fn set(&mut self, name: &str, value: &str) {
        let value = escaped(value);
        match self.attributes.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => self.attributes.push((name.to_owned(), value)),
        }
    }

    /// Takes an attribute away.
    pub fn unset(&mut self, name: &str) {
        self.attributes.retain(|(known, _)| known != name);
    }

    /// The elements in it.
    pub fn elements(&self) -> impl Iterator<Item = &Element> {
        self.children.iter().filter_map(|node| match node {
            Node::Element(element) => Some(element),
            Node::Other(_) => None,
        })
    }

    /// The elements in it, to be changed.
    pub fn elements_mut(&mut self) -> impl Iterator<Item = &mut Element> {
        self.children.iter_mut().filter_map(|node| match node {
            Node::Element(element) => Some(element),
            Node::Other(_) => None,
        })
    }

    /// The first with this name.
    pub fn find(&self, name: &str) -> Option<&Element> {
        self.elements().find(|element| element.name == name)
    }

    /// The first with this name; an empty one is added if there is none.
    pub fn find_or_add(&mut self, name: &str) -> &mut Element {
        let at = self.children.iter().position(|node| matches!(node, Node::Element(element) if element.name == name));
        let at = at.unwrap_or_else(|| {
            self.children.push(Node::Element(Element::new(name, &[])));
            self.children.len() - 1
        });
        match &mut self.children[at] {
            Node::Element(element) => element,
            Node::Other(_) => unreachable!("it was found as an element"),
        }
    }

    /// Takes out the elements for which this says so.
    pub fn remove(&mut self, is_wrong: impl Fn(&Element) -> bool) {
        self.children.retain(|node| !matches!(node, Node::Element(element) if is_wrong(element)));
    }

    /// The text in it.
    pub fn text(&self) -> String {
        let texts = self.children.iter().filter_map(|node| match node {
            Node::Other(text) if !text.starts_with("<!--") => Some(unescaped(text)),
            _ => None,
        });
        texts.collect::<String>().trim().to_owned()
    }

    /// As a document, indented anew by two.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        self.write(0, &mut text);
        text
    }

    fn write(&self, depth: usize, text: &mut String) {
        let _ = write!(text, "{:width$}<{}", "", self.name, width = depth * 2);
        for (name, value) in &self.attributes {
            let _ = write!(text, " {name}='{}'", value.replace('\'', "&apos;"));
        }
        let is_blank = |node: &Node| matches!(node, Node::Other(text) if text.trim().is_empty());
        if self.children.iter().all(is_blank) {
            text.push_str("/>\n");
            return;
        }
        // Text is kept on its line: spaces in it may mean something.
        if self.elements().next().is_none()
            && !self.children.iter().any(|node| matches!(node, Node::Other(text) if text.starts_with("<!--")))
        {
            text.push('>');
            for node in &self.children {
                if let Node::Other(other) = node {
                    text.push_str(other);
                }
            }
            let _ = writeln!(text, "</{}>", self.name);
            return;
        }
        text.push_str(">\n");
        for node in &self.children {
            match node {
                Node::Element(element) => element.write(depth + 1, text),
                Node::Other(_) if is_blank(node) => {}
                Node::Other(other) => {
                    let _ = writeln!(text, "{:width$}{}", "", other.trim(), width = depth * 2 + 2);
                }
            }
        }
        let _ = writeln!(text, "{:width$}</{}>", "", self.name, width = depth * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "<?xml version='1.0'?>\n<!-- before -->\n<domain type='kvm' xmlns:qemu=\"http://x/1.0\">\n  <name>a &amp; b</name>\n\
                            <metadata>\n<app:x xmlns:app='http://y'  k=\"it's\"/> <!-- kept --> </metadata>\n<on/></domain>";

    #[test]
    fn what_is_not_changed_stays() {
        let mut domain = parse(DOCUMENT).expect("it is XML");
        assert_eq!(domain.find("name").map(Element::text).as_deref(), Some("a & b"));
        domain.set("type", "q<e>'mu");
        domain.find_or_add("devices").children.push(Node::Element(Element::new("disk", &[("path", "/a&b")])));
        let text = domain.to_text();
        let expected = "<domain type='q&lt;e&gt;&apos;mu' xmlns:qemu='http://x/1.0'>\n  <name>a &amp; b</name>\n  <metadata>\n    \
                        <app:x xmlns:app='http://y' k='it&apos;s'/>\n    <!-- kept -->\n  </metadata>\n  <on/>\n  <devices>\n    \
                        <disk path='/a&amp;b'/>\n  </devices>\n</domain>\n";
        assert_eq!(text, expected);
        let again = parse(&text).expect("it is XML");
        assert_eq!(again.to_text(), text);
        assert_eq!(again.get("type").as_deref(), Some("q<e>'mu"));
        let metadata = again.find("metadata").expect("it is there");
        assert_eq!(metadata.elements().next().and_then(|x| x.get("k")).as_deref(), Some("it's"));
    }

    #[test]
    fn what_is_no_xml_is_an_error() {
        for document in ["", "domain", "<a>", "<a></b>", "<a b=c/>", "</a>", "<a b='1' b='2'/>"] {
            assert!(parse(document).is_err(), "{document}");
        }
    }

    #[test]
    fn an_entity_stands_for_nothing_else() {
        let document = "<!DOCTYPE d [<!ENTITY x SYSTEM '/etc/passwd'>]><d><name>&x;</name></d>";
        let parsed = parse(document).expect("it is XML");
        assert_eq!(parsed.find("name").map(Element::text).as_deref(), Some("&x;"));
    }
}
