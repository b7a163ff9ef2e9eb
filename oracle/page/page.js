'use strict';
// Draws a report from the data above. Whatever a report holds goes in as text, never as markup.
const data = JSON.parse(document.getElementById('data').textContent);

// ---- elements

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes))
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

function section(id, title, count, note, ...children) {
  return el(
      'section', {id}, el('h2', {}, title, count === null ? null : el('span', {class: 'count'}, count)),
      note ? el('p', {class: 'note'}, note) : null, ...children);
}

// ---- words for numbers: as the terminal says them

function value(x) {  // numbers that JSON cannot hold are words
  return x === 'inf' ? Infinity : x === '-inf' ? -Infinity : x === 'nan' ? NaN : x;
}
function ratio(x) {
  x = value(x);
  if (x === null || x === undefined) return '';
  if (Number.isNaN(x)) return 'nan';
  if (!Number.isFinite(x)) return x > 0 ? 'inf' : '-inf';
  const size = Math.abs(x);
  if (size === 0) return '0';
  if (size >= 1e5 || size < 1e-3) return x.toExponential(1).replace(/e([+-])(\d)$/, 'e$10$2');
  if (size >= 9.95) return x.toFixed(0);
  return size >= 0.995 ? x.toFixed(1) : String(Number(x.toPrecision(2)));
}
function integer(n) {  // 32 870
  return String(n).replace(/\B(?=(\d{3})+$)/g, '\u202f');
}
function seconds(s) {
  return s < 0.0995 ? (s * 1000).toFixed(0) + ' ms' : s < 9.95 ? s.toFixed(1) + ' s' : s.toFixed(0) + ' s';
}
const plural = (n, word) => `${integer(n)} ${word}${n === 1 ? '' : 's'}`;

function tone(word) {
  if (/^(passed|caught|no drift)$/i.test(word)) return 'good';
  return /^(skipped|vacuous|untested|equivalent|no judgement|interrupted)$/i.test(word) ? 'odd' : 'bad';
}
const tag = word => el('span', {class: 'tag ' + tone(word)}, word.replace('_', ' '));

// ---- lines to copy

function copy_old_way(text) {  // where the clipboard is not given to pages
  const area = el('textarea');
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  return done;
}
function copier(text) {
  const button = el('button', {class: 'copy', type: 'button', title: text, 'data-copy': text}, 'Copy');
  button.addEventListener('click', async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      done = copy_old_way(text);
    }
    button.textContent = done ? 'Copied' : 'Select it by hand';
    setTimeout(() => {
      button.textContent = 'Copy';
    }, 1500);
  });
  return button;
}
const call = text => el('div', {class: 'call'}, el('code', {}, text), copier(text));
const replay = row => data.program ? data.program + ' ' + row.replay : row.replay;

// A long list shows its beginning, and more where it is asked for.
function in_steps(rows, step, draw, into) {
  let shown = 0;
  const more = el('button', {class: 'more', type: 'button'});
  const go_on = () => {
    into.append(...rows.slice(shown, shown + step).map(draw));
    shown = Math.min(rows.length, shown + step);
    more.textContent = `Show ${Math.min(step, rows.length - shown)} more of ${integer(rows.length - shown)}`;
    more.hidden = shown === rows.length;
  };
  more.addEventListener('click', go_on);
  go_on();
  return more;
}

// ---- the answer

function answer() {
  const word = data.word;
  document.title = `${word} · Shardproof`;
  return el(
      'header', {class: 'answer ' + tone(word), id: 'answer'}, el('div', {class: 'who'}, 'Shardproof'),
      el('h1', {id: 'verdict'}, word), el('p', {class: 'sentence'}, data.sentence),
      data.complete === false ? el('p', {}, 'The run did not reach its end.') : null,
      data.command ? call(data.command) : null);
}

const tiles = [
  ['cases', 'case lines'], ['checks', 'checks'], ['passed', 'passed'], ['failed', 'failed', 'bad'],
  ['hung', 'hung', 'bad'], ['crashed', 'crashed', 'bad'], ['vacuous', 'vacuous', 'odd'],
  ['untested', 'untested', 'odd'], ['skipped', 'skipped', 'odd'], ['controls', 'broken runs'],
  ['controls_caught', 'caught'], ['controls_equivalent', 'equivalent'],
  ['controls_escaped', 'escaped', 'bad'], ['controls_wrong_check', 'wrong check', 'bad'],
  ['controls_weak', 'weak margin', 'bad'], ['controls_unjudged', 'unjudged', 'odd'], ['controls_unproven', 'not proven', 'odd']
];

function tile([name, title, colour]) {
  const n = data.summary[name];
  return el(
      'div', {class: 'tile ' + (n === 0 ? 'none' : colour || '')}, el('dt', {}, title),
      el('dd', {}, el('data', {id: 'n-' + name, value: n}, integer(n))));
}
function numbers() {
  const known = tiles.filter(([name]) => data.summary[name] !== undefined);
  const of = broken => known.filter(([name]) => name.startsWith('controls') === broken).map(tile);
  const time =
      el('div', {class: 'tile'}, el('dt', {}, 'wall time'), el('dd', {}, seconds(data.summary.wall_seconds)));
  const row = (...list) => el('dl', {class: 'tiles'}, ...list);
  const parts = data.summary.controls > 0 ? [row(...of(false)), row(...of(true), time)] : [row(...of(false), time)];
  return el('div', {id: 'numbers'}, ...parts);
}

// ---- what did not pass

function finding(row) {
  return el(
      'article', {class: 'finding ' + tone(row.verdict)},
      el('div', {class: 'head'}, tag(row.verdict), el('span', {}, row.check), el('code', {}, row.line),
         copier(replay(row))),
      row.block ? el('pre', {tabindex: '0'}, row.block) : call(replay(row)));
}
function findings() {
  const rows = data.failing;
  if (rows.length + data.failing_left_out === 0) return null;
  const list = el('div');
  const more = in_steps(rows, 10, finding, list);
  const rest = data.failing_left_out;
  return section(
      'failing', 'What did not pass', integer(rows.length + rest), '', list, more,
      rest > 0 ? el('p', {class: 'note'}, `${integer(rest)} more are in report.json.`) : null);
}

// ---- verdicts, with filters

function verdict_rows() {
  const {contracts, checks, lanes, verdicts, lines, rows} = data.passing;
  const passing = rows.map(([contract, check, lane, verdict, count, worst, line]) => ({
                             contract: contracts[contract][0],
                             family: contracts[contract][1],
                             check: checks[check],
                             lane: lanes[lane],
                             verdict: verdicts[verdict],
                             count,
                             ratio: worst,
                             line: line < 0 ? '' : lines[line]
                           }));
  const nearest = row => row.ratio === null ? -1 : value(row.ratio);  // to its bound
  passing.sort((a, b) => nearest(b) - nearest(a));
  return data.failing.filter(row => !row.control).map(row => ({...row, count: 1})).concat(passing);
}
function bar(x) {
  x = value(x);
  if (typeof x !== 'number' || !(x > 0)) return null;
  const part = el('i', {class: x > 0.8 ? 'near' : null});
  part.style.width = Math.max(3, Math.min(1, x) * 100) + '%';  // of the bound
  return el('span', {class: 'bar', 'aria-hidden': 'true'}, part);
}
function verdict_row(row) {
  const line = row.replay ? replay(row) :
      row.line            ? `${data.program} run ${row.line} --check ${row.check}` :
                            '';
  return el(
      'tr', {}, el('td', {}, tag(row.verdict)), el('td', {}, row.contract), el('td', {}, row.check),
      el('td', {class: 'mono'}, row.lane),
      el('td', {class: 'number', 'data-unit': row.count === 1 ? 'check' : 'checks'}, integer(row.count)),
      el('td', {class: 'number', 'data-unit': row.ratio === null ? '' : 'of its bound'}, bar(row.ratio),
         el('span', {class: 'ratio'}, ratio(row.ratio))),
      el('td', {class: 'line'}, line ? el('div', {}, el('code', {}, row.line), copier(line)) : null));
}
function select(title, choices, changed) {
  const box =
      el('select', {'aria-label': title}, el('option', {value: ''}, title),
         ...choices.map(choice => el('option', {value: choice}, choice)));
  box.addEventListener('change', () => changed(box.value));
  return box;
}
function verdicts() {
  const all = verdict_rows();
  const wanted = {};
  const distinct = key => [...new Set(all.map(row => row[key]))].sort();
  const holds = row => ['family', 'contract', 'check', 'lane', 'verdict'].every(
                           key => !wanted[key] || row[key] === wanted[key]) &&
      (!wanted.text ||
       `${row.line} ${row.contract} ${row.check} ${row.lane}`.toLowerCase().includes(wanted.text));
  const place = el('div'), told = el('p', {class: 'note', id: 'matching'});
  const draw = () => {
    const rows = all.filter(holds);
    const body = el('tbody');
    const more = in_steps(rows, 20, verdict_row, body);
    const head =
        el('tr', {}, ...['verdict', 'contract', 'check', 'lane'].map(name => el('th', {}, name)),
           el('th', {class: 'number'}, 'checks'), el('th', {class: 'number'}, 'worst ratio'),
           el('th', {}, 'on the line'));
    told.textContent =
        `${plural(rows.reduce((n, row) => n + row.count, 0), 'check')} in ${plural(rows.length, 'row')}`;
    place.replaceChildren(
        rows.length ?
            el('div', {class: 'wide'},
               el('table', {class: 'verdicts', id: 'verdicts-table'}, el('thead', {}, head), body)) :
            el('p', {class: 'nothing'}, 'No check matches.'),
        more);
  };
  const set = key => choice => {
    wanted[key] = choice;
    draw();
  };
  const search = el('input', {type: 'search', placeholder: 'Part of a line', 'aria-label': 'Part of a line'});
  search.addEventListener('input', () => set('text')(search.value.trim().toLowerCase()));
  const filters = ['verdict', 'family', 'contract', 'check', 'lane'].map(
      key => select(
          {
            verdict: 'Every verdict',
            family: 'Every family',
            contract: 'Every contract',
            check: 'Every check',
            lane: 'Every lane'
          }[key],
          distinct(key), set(key)));
  draw();
  return section(
      'verdicts', 'Verdicts', null,
      'Checks that passed are summed by contract, check and lane, the nearest to its bound first. The ratio is error over bound of the ' +
          'worst element, the line is the one that it was met on.',
      el('div', {class: 'filters'}, ...filters, search), told, place);
}

// ---- pictures: log scales, drawn at the width that there is

const pictures = [];
function picture(draw) {
  const box = el('div', {class: 'picture'});
  let width = 0;
  const again = () => {
    const now = Math.max(280, box.clientWidth - 16 || 280);
    if (now === width) return;
    width = now;
    box.querySelector('svg')?.remove();
    box.append(draw(width));
  };
  new ResizeObserver(again).observe(box);
  pictures.push(again);
  return box;
}
const decade = n => n === 0 ? '1' : n === 1 ? '10' : '1e' + n;

function families_picture(width) {
  const rows = data.families, of = name => data.power.filter(p => p.family === name);
  const shown = data.power.flatMap(p => [value(p.worst), value(p.ratio)])
                    .filter(x => Number.isFinite(x) && x > 0)
                    .map(Math.log10);
  const low = Math.max(-4, Math.floor(Math.min(-2, ...shown))),
        high = Math.min(16, Math.ceil(Math.max(2, ...shown)));
  const left = Math.min(110, width * 0.28), right = 18, top = 22, height = 30;
  const x = r =>
      left + (Math.max(low, Math.min(high, Math.log10(r))) - low) / (high - low) * (width - left - right);
  const root = svg(
      'svg',
      {height: top + rows.length * height + 24, role: 'img', 'aria-label': 'Worst ratios of each family'});
  const step = Math.max(1, Math.ceil((high - low) / ((width - left) / 46)));
  for (let n = low; n <= high; n++) {
    if (n % step !== 0) continue;
    root.append(
        svg('line', {class: 'grid', x1: x(10 ** n), x2: x(10 ** n), y1: top, y2: top + rows.length * height}),
        svg('text', {x: x(10 ** n), y: top + rows.length * height + 16, 'text-anchor': 'middle'}, decade(n)));
  }
  root.append(
      svg('line', {class: 'bound', x1: x(1), x2: x(1), y1: top - 6, y2: top + rows.length * height}),
      svg('text', {x: x(1), y: 12, 'text-anchor': 'middle'}, 'bound'));
  rows.forEach((family, i) => {
    const y = top + (i + 0.5) * height;
    root.append(svg('text', {class: 'strong', x: 0, y: y + 4}, family.name));
    const checks = of(family.name), dots = [];
    const healthy = checks.filter(p => value(p.worst) > 0), broken = checks.filter(p => value(p.ratio) > 0);
    const worst = Math.max(...healthy.map(p => value(p.worst))),
          weakest = Math.min(...broken.map(p => value(p.ratio)));
    if (healthy.length && broken.length)
      dots.push(svg('line', {class: 'between', x1: x(worst), x2: x(weakest), y1: y, y2: y}));
    for (const p of healthy)
      dots.push(svg(
          'circle',
          {class: 'healthy' + (value(p.worst) === worst ? '' : ' faint'), cx: x(value(p.worst)), cy: y, r: 5},
          svg('title', {}, `${p.check}: worst healthy ratio ${ratio(p.worst)} on ${p.worst_line}`)));
    for (const p of broken)
      dots.push(
          svg('path', {
            class: 'broken' + (value(p.ratio) === weakest ? '' : ' faint'),
            d: `M${x(value(p.ratio))},${y - 6}l6,6l-6,6l-6,-6z`
          },
              svg('title', {},
                  `${p.check}: weakest control ${p.weakest}, ratio ${ratio(p.ratio)}, margin ${
                      ratio(p.margin)}`)));
    if (dots.length === 0) dots.push(svg('text', {x: x(1) + 10, y: y + 4}, 'exact'));
    root.append(...dots);
  });
  return root;
}
function families() {
  if (data.families.length === 0) return null;
  const key =
      el('div', {class: 'key'}, el('span', {}, el('i'), 'worst healthy run of a check'),
         el('span', {}, el('i', {class: 'broken'}), 'weakest control that it caught'),
         el('span', {}, el('i', {class: 'bound'}), 'bound'));
  const box = picture(families_picture);
  box.prepend(key);
  const head = [
    'family', 'contracts', 'checks', 'did not pass', 'caught', 'equivalent', 'worst ratio', 'margin',
    'seconds'
  ];
  const body = data.families.map(
      f => el(
          'tr', {}, el('td', {}, f.name),
          ...[integer(f.contracts), integer(f.checks), integer(f.not_passed), integer(f.caught),
              integer(f.equivalent), f.worst === 0 ? 'exact' : ratio(f.worst), f.margin, f.seconds.toFixed(1)]
              .map(text => el('td', {class: 'number'}, text))));
  const table = el(
      'table', {id: 'families-table'},
      el('thead', {}, el('tr', {}, ...head.map((name, i) => el('th', {class: i ? 'number' : null}, name)))),
      el('tbody', {}, ...body));
  return section(
      'families', 'Worst ratios', null,
      'Error over bound. Left of the bound stand healthy runs, right of it broken twins; the gap between them is what a verdict rests on.',
      box, el('div', {class: 'wide', style: 'margin-top:8px'}, table));
}

// ---- controls x checks

function cell(row, check) {
  const seen = row.cells[check];
  if (seen) {
    const margin = value(seen.margin), exact = seen.exact || margin === Infinity;
    const strength = exact ? 1 : Math.max(0, Math.min(1, Math.log10(margin) / 8));
    const weak = !exact && !(margin >= 10);
    const td =
        el('td', {
          class: 'cell' + (weak ? ' bad' : ''),
          title: `${row.name}, ${check}: ${exact ? 'exact' : 'margin ' + ratio(margin)} in ${
              plural(seen.runs, 'run')}`
        },
           seen.exact ? 'exact' : ratio(margin));
    if (!weak) td.style.backgroundColor = `rgba(var(--seen), ${0.1 + 0.3 * strength})`;
    return td;
  }
  if (row.unseen.includes(check))
    return el('td', {class: 'cell bad', title: `${check} had to see it and did not`}, 'blind');
  if (row.also.includes(check)) return el('td', {class: 'cell also', title: `${check} fires too`}, '•');
  return el('td', {class: 'cell'});
}
function matrix(family) {
  const rows = data.controls.filter(row => row.family === family);
  const columns = data.checks.filter(
      check => rows.some(row => row.cells[check] || row.also.includes(check) || row.unseen.includes(check)));
  const sum = key => rows.reduce((n, row) => n + row[key], 0);
  const lost = sum('lost');
  const head =
      el('tr', {}, el('th', {}, 'control'), ...columns.map(name => el('th', {}, el('span', {}, name))),
         el('th', {class: 'number'}, 'runs'), el('th', {}, 'imitates'));
  const box =
      el('details', {class: 'family'},
         el('summary', {}, family,
            el('small', {}, `${integer(sum('caught'))} caught, ${integer(sum('equivalent'))} equivalent `),
            lost ? el('span', {class: 'tag bad'}, `${integer(lost)} not caught`) : null));
  const draw = () => {
    if (box.childElementCount > 1) return;
    const body =
        el('tbody', {},
           ...rows.map(
               row =>
                   el('tr', {}, el('th', {title: row.name}, row.operator ? row.name : el('b', {}, row.name)),
                      ...columns.map(check => cell(row, check)),
                      el('td', {class: 'number text'}, integer(row.runs)),
                      el('td', {class: 'text'}, row.imitates))));
    box.append(el('div', {class: 'wide'}, el('table', {class: 'matrix'}, el('thead', {}, head), body)));
  };
  box.addEventListener('toggle', draw);
  if (lost || family === data.controls[0].family) {
    draw();
    box.open = true;
  }
  return box;
}
function controls() {
  if (data.controls.length === 0) return null;
  const families = [...new Set(data.controls.map(row => row.family))];
  return section(
      'controls', 'Controls and the checks that see them', null,
      'Named controls are bold, broken collectives plain. A number is the margin: the broken run over its healthy twin, at least 10 is due; ' +
          'exact: the bound is 0. A dot: this check fires too.',
      ...families.map(matrix));
}

// ---- lanes and what the run was

function lanes() {
  if (data.lanes.length === 0) return null;
  const split = lane => {
    const at = lane.name.lastIndexOf('.np');
    return at < 0 ? [lane.name, ''] : [lane.name.slice(0, at), Number(lane.name.slice(at + 3))];
  };
  const transports = [...new Set(data.lanes.map(lane => split(lane)[0]))];
  const counts =
      [...new Set(data.lanes.map(lane => split(lane)[1]).filter(n => n !== ''))].sort((a, b) => a - b);
  const row = transport => {
    const mine = data.lanes.filter(lane => split(lane)[0] === transport);
    const at = n => mine.find(lane => split(lane)[1] === n);
    const reasons =
        [...new Set(mine.filter(lane => !lane.proven).map(lane => lane.reason || 'not proven'))].join('; ');
    return el(
        'tr', {}, el('th', {}, transport), ...counts.map(n => {
          const lane = at(n);
          return !lane ?
              el('td') :
              el('td', {class: lane.proven ? 'yes' : 'no', title: lane.proven ? 'proven' : lane.reason},
                 lane.proven ? '✓' : '✗');
        }),
        el('td', {}, mine.every(lane => lane.proven) ? '' : el('span', {}, tag('not proven'), ' ', reasons)));
  };
  const head =
      el('tr', {}, el('th', {}, 'ranks'),
         ...counts.map(n => el('th', {style: 'text-align:center'}, String(n))), el('th'));
  return section(
      'lanes', 'Lanes', null, '',
      el('div', {class: 'wide'},
         el('table', {class: 'lanes'}, el('thead', {}, head), el('tbody', {}, ...transports.map(row)))));
}
function facts() {
  const rows = data.facts.filter(([, text]) => text !== '');
  if (rows.length === 0) return null;
  return section(
      'facts', data.kind === 'drift' ? 'The run' : 'Made by', null, '',
      el('dl', {class: 'facts'},
         ...rows.flatMap(([name, text]) => [el('dt', {}, name), el('dd', {}, text)])));
}

// ---- drift: distance from a run without the fault, by step

function distance_picture(width) {
  const points = data.distance.filter(([, d]) => d > 0);
  const left = 52, right = 14, top = 14, height = Math.min(300, Math.max(180, width * 0.4)), bottom = 46;
  const logs = points.map(([, d]) => Math.log10(d));
  const low = Math.floor(Math.min(...logs)), high = Math.max(low + 1, Math.ceil(Math.max(...logs)));
  const first = Math.min(...data.distance.map(([s]) => s)),
        last = Math.max(first + 1, ...data.distance.map(([s]) => s));
  const x = s => left + (s - first) / (last - first) * (width - left - right);
  const y = d => top + (high - Math.log10(d)) / (high - low) * (height - top - bottom);
  const root = svg('svg', {height, role: 'img', 'aria-label': 'Distance by step'});
  const every = Math.max(1, Math.ceil((high - low) / 8));
  for (let n = low; n <= high; n += every)
    root.append(
        svg('line', {class: 'grid', x1: left, x2: width - right, y1: y(10 ** n), y2: y(10 ** n)}),
        svg('text', {x: left - 8, y: y(10 ** n) + 4, 'text-anchor': 'end'}, decade(n)));
  const ticks = Math.max(1, Math.min(6, Math.floor(width / 90), last - first));
  for (let i = 0; i <= ticks; i++) {
    const s = Math.round(first + (last - first) * i / ticks);
    root.append(
        svg('text', {x: x(s), y: height - 28, 'text-anchor': i === ticks ? 'end' : 'middle'}, String(s)));
  }
  root.append(
      svg('text', {x: (left + width - right) / 2, y: height - 8, 'text-anchor': 'middle'}, 'training step'));
  const path = points.map(([s, d], i) => `${i ? 'L' : 'M'}${x(s).toFixed(1)},${y(d).toFixed(1)}`).join('');
  const floor = height - bottom;
  root.append(
      svg('path', {
        class: 'below',
        d: `${path}L${x(points[points.length - 1][0]).toFixed(1)},${floor}L${x(points[0][0]).toFixed(1)},${
            floor}z`
      }),
      svg('path', {class: 'curve', d: path}));
  const marks = points.length <= 40 ? points : [points[0], points[points.length - 1]];
  for (const [s, d] of marks)
    root.append(
        svg('circle', {class: 'broken', cx: x(s), cy: y(d), r: 3.5},
            svg('title', {}, `step ${s}: ${d.toExponential(1)}`)));
  return root;
}
function distance() {
  if (!data.distance.some(([, d]) => d > 0)) return null;
  return section(
      'distance', 'Distance per step', null,
      'Rms of all parameters, relative, against a run without the fault that starts at the first wrong step.',
      picture(distance_picture));
}
function drift_block() {
  if (!data.block) return null;
  return section(
      'block', ['NO DRIFT', 'INTERRUPTED'].includes(data.word) ? 'What was compared' : 'Where it went wrong', null, '',
      el('article', {class: 'finding ' + tone(data.word)},
         el('div', {class: 'head'}, tag(data.word), el('code', {}, data.replay), copier(data.replay)),
         el('pre', {tabindex: '0'}, data.block)));
}

const parts = data.kind === 'drift' ? [answer, drift_block, distance, facts] :
                                      [answer, numbers, findings, verdicts, families, controls, lanes, facts];
document.getElementById('page').replaceChildren(...parts.map(part => part()).filter(node => node));
for (const draw of pictures) draw();  // each knows its width now
