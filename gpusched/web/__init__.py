"""The page: what the cluster does now and in the next hours, to look at; it only reads.

In: the store, opened read-only, and the inventory. Out: HTTP, or files that any web server can hand out. May import:
client, forecast, views, queue, config, model. Begin with `feed.Feed`, which computes what all viewers see once for each
change; `server.serve` hands it out, and `page/app.js` draws it.
"""
