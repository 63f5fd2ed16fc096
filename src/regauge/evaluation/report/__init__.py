"""Reports on runs, comparisons and benchmarks, as HTML page, Markdown or JSON.

Entry points: `page.build_report` and `render.write_report`. `page` and the `*_section` modules turn
results into formatted text and `charts`; they know no markup. `render` fills the templates, and
`drawing` draws the charts. This package does not import torch.
"""
