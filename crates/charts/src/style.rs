//! The style sheet: Okabe and Ito's colours, which colour-blind readers can tell apart; light, dark and paper; cards instead of
//! tables on a phone; filters without a script.

/// See the module.
pub(crate) const STYLE: &str = "
:root{--bg:#fff;--fg:#1c1c1c;--soft:#555;--grid:#ddd;--hatch:#ffffffb0;--good:#00664d;--middle:#0b5c94;--bad:#a33c00;--paper:#111;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#56b4e9;--c4:#cc79a7;--c5:#d55e00;--c6:#7a7a7a;--c7:#b8a900;--c8:#8a5a2b;--c9:#5b4bb7}
@media (prefers-color-scheme:dark){:root{--bg:#16181b;--fg:#e8e8e8;--soft:#a8a8a8;--grid:#3a3d42;--hatch:#16181bb0;--good:#4fd0a8;--middle:#7cc4f5;--bad:#ff9a60;--paper:#fff;--c0:#4aa8e0;--c1:#f0b030;--c2:#2fc79b;--c3:#8fd0f5;--c4:#e09cc4;--c5:#f0803c;--c6:#a0a0a0;--c7:#f0e442;--c8:#c89a6a;--c9:#a79bf0}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#444;--grid:#ccc;--hatch:#ffffffc0;--good:#000;--middle:#000;--bad:#000;--paper:#000}figure,tr{break-inside:avoid}h2,h3{break-after:avoid}thead{display:table-header-group}details>*{display:block}svg.plot{max-width:520px}body{max-width:none}nav,.filter{display:none}}
*{box-sizing:border-box}html{scroll-padding-top:1em}
body{background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif;max-width:1480px;margin:0 auto;padding:1em}
h1{font-size:1.5em;margin:.2em 0}h2{font-size:1.25em;margin:1.6em 0 .4em;border-top:2px solid var(--grid);padding-top:.6em}h3{font-size:1.05em;margin:1.4em 0 .2em}h4{font-size:.95em;margin:.8em 0 .1em}
p{margin:.25em 0 .6em;max-width:80em}.soft{color:var(--soft)}a{color:inherit}
.withnav{display:grid;grid-template-columns:15em minmax(0,1fr);gap:2em}nav{position:sticky;top:1em;align-self:start;max-height:96vh;overflow:auto;font-size:.86em}nav ul{list-style:none;margin:.1em 0 .7em;padding:0}nav li{margin:.12em 0}nav a{text-decoration:none}nav a:hover{text-decoration:underline}nav b{display:block;margin-top:.5em}
.first{display:grid;grid-template-columns:minmax(22em,1fr) minmax(0,2fr);gap:1.2em}.first ul{margin:.2em 0;padding-left:1.1em}.what{border-left:4px solid var(--c1);padding:.1em .8em;margin:.6em 0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:.3em 1.5em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88em;margin:.4em 0}
th,td{padding:.25em .7em;text-align:left;border-bottom:1px solid var(--grid);vertical-align:top}th{color:var(--soft);font-weight:600}td.n,th.n{text-align:right;white-space:nowrap}
.good{color:var(--good)}.middle{color:var(--middle)}.bad{color:var(--bad)}.open{color:var(--soft)}b.good,b.middle,b.bad,b.open{font-weight:600}
figure{margin:0 0 .6em}svg.plot{width:100%;height:auto;max-width:720px;display:block}svg text{fill:var(--fg);font:11px system-ui,sans-serif}svg .title{font-size:12px;font-weight:600}svg .tick{fill:var(--soft)}svg .value{font-size:9.5px}svg a text{text-decoration:none}
.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}.whisker{stroke:var(--fg);stroke-width:1.2;fill:none}.bar{stroke:var(--fg);stroke-width:.5}.bar.single{fill-opacity:.28;stroke-width:1.4}.hatch{stroke:var(--hatch);stroke-width:1.4;fill:none}
.paper{fill:var(--bg);stroke:var(--paper);stroke-width:1.6}.dot{stroke:var(--bg);stroke-width:.6}.dot.good{fill:var(--good)}.dot.middle{fill:var(--middle)}.dot.bad{fill:var(--bad)}.dot.open{fill:var(--soft)}.dot.single{fill:var(--bg);stroke-width:1.5}.dot.single.open{stroke:var(--soft)}.dot.single.bad{stroke:var(--bad)}.spread{stroke-width:2.4;opacity:.55}.spread.good{stroke:var(--good)}.spread.middle{stroke:var(--middle)}.spread.bad{stroke:var(--bad)}.spread.open{stroke:var(--soft)}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}.f6{fill:var(--c6)}.f7{fill:var(--c7)}.f8{fill:var(--c8)}.f9{fill:var(--c9)}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}.s6{stroke:var(--c6)}.s7{stroke:var(--c7)}.s8{stroke:var(--c8)}.s9{stroke:var(--c9)}.curve{fill:none;stroke-width:1.8}
.key{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:.9em;margin:.2em 0}.key span{display:inline-flex;align-items:center;gap:.4em}.key svg{width:30px;height:12px}
code{background:color-mix(in srgb,var(--grid) 45%,transparent);padding:.1em .35em;border-radius:3px;font-size:.92em;overflow-wrap:anywhere}
.note{border-left:4px solid var(--c1);padding:.2em .8em}details{margin:.4em 0}summary{cursor:pointer;color:var(--soft)}
.filter{display:flex;flex-wrap:wrap;gap:.3em 1em;margin:.6em 0;font-size:.92em}.filter label{cursor:pointer}
body:has(#only-good:checked) tr.v:not(.is-good),body:has(#only-middle:checked) tr.v:not(.is-middle),body:has(#only-bad:checked) tr.v:not(.is-bad),body:has(#only-open:checked) tr.v:not(.is-open){display:none}
@media (max-width:900px){.withnav,.first{display:block}nav{position:static;max-height:none;columns:2;border-bottom:1px solid var(--grid);margin-bottom:1em}}
@media (max-width:620px){body{padding:.6em}table.cards thead{display:none}table.cards,table.cards tbody,table.cards tr,table.cards td{display:block;width:100%}table.cards tr{border:1px solid var(--grid);border-radius:6px;margin:.5em 0;padding:.3em .5em}table.cards td{border:0;padding:.1em 0;text-align:left;white-space:normal}table.cards td::before{content:attr(data-name) ' ';color:var(--soft);font-size:.85em}table.cards td:empty{display:none}.wide{overflow-x:visible}}
";
