"""Reports on runs, comparisons and benchmarks, as HTML page, Markdown or JSON.

Entry points: `page.build_report` and `render.write_report`. `page` and the `*_section` modules turn
results into formatted text; they know no markup. `*_charts` choose the curves that `drawing` draws.
`render` fills the templates. Nothing here imports torch.
"""
