"""Render data as tables, text and JSON. Views load nothing themselves.

In: values of services. Out: Rich renderables, JSON, pages. May import: model; others for types only. Begin with
`common`.
"""
