//! The report in a real browser: Debian's headless Chromium draws it, light and dark, as wide as a phone, a tablet and a desk have it,
//! and the picture is looked at. The numbers on it are made up; that a page is drawn from them is what is tested.

use flate2::read::ZlibDecoder;
use lab::catalogue::{self, Kind};
use lab::cell::{Cell, Group};
use lab::measured::{CellResult, Parameters};
use lab::results::{self, Results, SCHEMA};
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

/// Those of a phone, a tablet and a desk, in pixels.
const WIDTHS: [usize; 3] = [390, 820, 1280];
const HEIGHT: usize = 3000;

/// A page around frames of the report, so that one start of the browser draws it at every width. Above each frame are three squares, which say
/// in their colours how wide the report is, how many figures it shows, and how many of them are not within its width or have no size. Then the frame
/// is scrolled to the first plot.
const FRAMES: &str = "<!DOCTYPE html><meta charset='utf-8'><meta name='color-scheme' content='light dark'>
<style>:root{color-scheme:light dark}body{margin:0;display:flex}div{flex:none}i{float:left;width:8px;height:8px}iframe{display:block;clear:left;border:0}</style>
<script>
addEventListener('load', () => {
    const box = one => one.getBoundingClientRect();
    for (const column of document.querySelectorAll('div')) {
        const frame = column.querySelector('iframe'), view = frame.contentWindow, report = frame.contentDocument;
        const isSmall = plot => box(plot).width < 200 || box(plot).height < 80;
        const isOutside = figure => box(figure).left < 0 || box(figure).right > view.innerWidth + 0.5;
        const isLost = figure => isOutside(figure) || [...figure.querySelectorAll('svg.plot')].some(isSmall);
        const figures = [...report.querySelectorAll('figure')].filter(figure => figure.checkVisibility());
        const numbers = [report.documentElement.scrollWidth, figures.length, figures.filter(isLost).length];
        column.querySelectorAll('i').forEach((square, index) => {
            square.style.background = `rgb(${numbers[index] >> 8},${numbers[index] & 255},90)`;
        });
        view.scrollTo(0, box(report.querySelector('svg.plot')).top);
    }
});
</script>
";
/// A side of such a square, and the blue of its colour.
const SQUARE: usize = 8;
const BLUE: u8 = 90;

/// The experiment that was not run.
const NOT_RUN: &str = "spe2012-tab4";

/// Results of every other experiment, as if they had been measured.
fn made_up(directory: &Path) {
    let parameters = Parameters { scale: 1.0, platform: "kvm, Linux 6.12".into(), ..Parameters::for_tests() };
    let is_run = |experiment: &&catalogue::Experiment| experiment.kind != Kind::Missing && experiment.id != NOT_RUN;
    for experiment in catalogue::all().unwrap().iter().filter(is_run) {
        let mut cells = Vec::new();
        for iteration in 0..5 {
            for (index, mode) in experiment.modes.iter().enumerate() {
                for guests in [1, 4] {
                    let workload = experiment.workloads.first().map_or("none", |workload| workload.name()).to_owned();
                    let group = Group { disk: "none".into(), parameter: 0, guests, workload, mode: *mode };
                    let value = f64::from(guests) * (3.0 + index as f64) + f64::from(iteration) * 0.1;
                    let fields = experiment.plot.split(' ').chain(["seconds", "bytes_to_storage"]);
                    let guest: BTreeMap<String, f64> = fields.map(|field| (field.to_owned(), value)).collect();
                    let cell = Cell { group, iteration };
                    let curve = |field: &str| (field.to_owned(), vec![(0.0, 0.0), (1.0, value), (2.0, value / 2.0)]);
                    cells.push(CellResult {
                        guests: vec![guest],
                        wall_seconds: 1.0,
                        curves: experiment.curves.split_whitespace().map(curve).collect(),
                        ..CellResult::empty(&cell, &parameters)
                    });
                }
            }
        }
        let rows = results::summarise(&cells);
        let verdicts = results::judge(experiment, &rows, &parameters);
        let results = Results {
            schema: SCHEMA,
            id: experiment.id.clone(),
            title: experiment.title.clone(),
            commit: "0000".into(),
            machine: BTreeMap::new(),
            command: format!("amberlog lab run {}", experiment.id),
            ended: 0,
            parameters: parameters.clone(),
            curves: results::curves(experiment, &cells),
            rows,
            declared: results::Declared::default(),
            verdicts,
            raw: "raw".into(),
        };
        let own = directory.join(&experiment.id);
        std::fs::create_dir_all(&own).unwrap();
        results::write(&own.join("results.json"), &results).unwrap();
    }
}

/// The pixels of an 8-bit PNG without interlacing, as Chromium writes them: three bytes each.
fn pixels(png: &[u8]) -> (usize, Vec<[u8; 3]>) {
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    let (mut at, mut width, mut channels, mut packed) = (8, 0, 0, Vec::new());
    while at + 8 <= png.len() {
        let length = u32::from_be_bytes(png[at..at + 4].try_into().unwrap()) as usize;
        let body = &png[at + 8..at + 8 + length];
        match &png[at + 4..at + 8] {
            b"IHDR" => {
                width = u32::from_be_bytes(body[..4].try_into().unwrap()) as usize;
                assert_eq!((body[8], body[12]), (8, 0), "8 bits, not interlaced");
                channels = if body[9] == 6 { 4 } else { 3 };
            }
            b"IDAT" => packed.extend_from_slice(body),
            _ => {}
        }
        at += length + 12;
    }
    let mut raw = Vec::new();
    ZlibDecoder::new(packed.as_slice()).read_to_end(&mut raw).unwrap();
    let stride = width * channels;
    let mut previous = vec![0u8; stride];
    let mut all = Vec::new();
    for line in raw.chunks_exact(stride + 1) {
        let mut row = line[1..].to_vec();
        for i in 0..stride {
            let left = if i >= channels { row[i - channels] } else { 0 };
            let corner = if i >= channels { previous[i - channels] } else { 0 };
            let above = previous[i];
            let add = match line[0] {
                0 => 0,
                1 => left,
                2 => above,
                3 => ((u16::from(left) + u16::from(above)) / 2) as u8,
                _ => {
                    let (a, b, c) = (i16::from(left), i16::from(above), i16::from(corner));
                    let (pa, pb, pc) = ((b - c).abs(), (a - c).abs(), (a + b - 2 * c).abs());
                    if pa <= pb && pa <= pc {
                        left
                    } else if pb <= pc {
                        above
                    } else {
                        corner
                    }
                }
            };
            row[i] = row[i].wrapping_add(add);
        }
        all.extend(row.chunks_exact(channels).map(|pixel| [pixel[0], pixel[1], pixel[2]]));
        previous = row;
    }
    (width, all)
}

/// The report at one width.
struct Drawn {
    width: usize,
    /// How often each colour occurs.
    colours: HashMap<[u8; 3], usize>,
    /// What a reader would have to scroll through.
    scroll_width: usize,
    figures: usize,
    lost_figures: usize,
}

/// Draws the report that is in a directory at all widths.
fn drawn(directory: &Path, name: &str, dark: bool) -> Vec<Drawn> {
    let browser = guest_kit::program::find_program("chromium").expect("scripts/install-packages.sh installs chromium");
    let of_kind = |kind: &str| directory.join(name).with_extension(kind);
    let frames = WIDTHS.map(|width| {
        let frame = format!("<iframe src='index.html' width='{width}' height='{HEIGHT}'></iframe>");
        format!("<div style='width:{width}px'><i></i><i></i><i></i>{frame}</div>")
    });
    std::fs::write(of_kind("html"), FRAMES.to_owned() + &frames.concat()).unwrap();
    let status = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"])
        // The page around the frames looks into them.
        .arg("--allow-file-access-from-files")
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("--user-data-dir={}", of_kind("profile").display()))
        .arg(format!("--window-size={},{}", WIDTHS.iter().sum::<usize>(), SQUARE + HEIGHT))
        .arg(format!("--screenshot={}", of_kind("png").display()))
        .arg(format!("file://{}", of_kind("html").display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("chromium can be started");
    assert!(status.success(), "chromium ended with {status}");
    let (across, all) = pixels(&std::fs::read(of_kind("png")).expect("chromium wrote a picture"));
    assert_eq!(across, WIDTHS.iter().sum::<usize>());
    let mut left = 0;
    let mut at_width = |width: usize| {
        let number = |square: usize| {
            let [high, low, blue] = all[SQUARE / 2 * across + left + SQUARE * square + SQUARE / 2];
            assert_eq!(blue, BLUE, "{name}: the browser has not looked at the report, {width} pixels wide");
            usize::from(high) << 8 | usize::from(low)
        };
        let mut colours = HashMap::new();
        for line in all.chunks_exact(across).skip(SQUARE) {
            for pixel in &line[left..left + width] {
                *colours.entry(*pixel).or_insert(0) += 1;
            }
        }
        let found = Drawn { width, colours, scroll_width: number(0), figures: number(1), lost_figures: number(2) };
        left += width;
        found
    };
    WIDTHS.iter().map(|width| at_width(*width)).collect()
}

#[test]
fn a_browser_draws_the_report_in_light_and_dark_at_every_width() {
    let directory = tempfile::tempdir().unwrap();
    made_up(directory.path());
    let page = lab::report::write(directory.path(), &catalogue::all().unwrap()).unwrap();
    assert_eq!(page, directory.path().join("index.html"));
    let text = std::fs::read_to_string(&page).unwrap();
    for forbidden in ["<script", "http://", "https://", "@import", "url(data"] {
        assert!(!text.contains(forbidden), "the page is self-contained and has no {forbidden}");
    }
    // Of each: background, the colours of three series.
    for (name, dark, background, bars) in [
        ("light", false, [255, 255, 255], [[0x00, 0x72, 0xb2], [0xe6, 0x9f, 0x00], [0x00, 0x9e, 0x73]]),
        ("dark", true, [0x16, 0x18, 0x1b], [[0x4a, 0xa8, 0xe0], [0xf0, 0xb0, 0x30], [0x2f, 0xc7, 0x9b]]),
    ] {
        let of_theme = drawn(directory.path(), name, dark);
        for Drawn { width, colours, scroll_width, figures, lost_figures } in &of_theme {
            let name = format!("{name}, {width} pixels wide");
            let all: usize = colours.values().sum();
            let of = |colour: [u8; 3]| colours.get(&colour).copied().unwrap_or(0);
            assert!(scroll_width <= width, "{name}: the page is {scroll_width} pixels wide: it is scrolled sideways");
            assert!(*figures > 20, "{name}: {figures} figures are shown");
            assert_eq!(*lost_figures, 0, "{name}: figures that are not within the page's width, or have no size");
            assert!(of(background) > all / 3, "{name}: the background is what it should be");
            assert!(of(background) < all * 98 / 100, "{name}: the page is not blank");
            assert!(colours.len() > 50, "{name}: text is smoothed into many colours, not {}", colours.len());
            for bar in bars {
                assert!(of(bar) > 1000, "{name}: bars of colour {bar:x?} are drawn");
            }
        }
        let shown: Vec<usize> = of_theme.iter().map(|one| one.figures).collect();
        assert!(shown.iter().all(|figures| *figures == shown[0]), "{name}: {shown:?} figures at {WIDTHS:?} pixels");
    }
}

#[test]
fn the_page_says_what_agrees_what_differs_and_how_to_run_it_again() {
    let directory = tempfile::tempdir().unwrap();
    made_up(directory.path());
    let all = results::read_all(directory.path()).unwrap();
    let page = lab::report::page(&all, &catalogue::all().unwrap());
    for expected in [
        "amberlog lab run spe2012-fig06",
        "What differs",
        "vma against journal: up to −50.9 %",
        "not run; amberlog lab run spe2012-tab4",
        "Over time: copied blocks (copy-on-write)",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
    assert_eq!(page.matches("<section").count(), page.matches("</section>").count());
    let broken = directory.path().join("spe2012-fig06/results.json");
    std::fs::write(broken, "nonsense").unwrap();
    assert!(
        lab::report::write(directory.path(), &[]).unwrap_err().to_string().contains("is not what amberlog lab writes")
    );
}
