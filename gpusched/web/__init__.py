"""The read-only web page: the cluster now and in the next hours.

In: the store, opened read-only, and the inventory. Out: HTTP, or files that any web server can serve. May import:
client, forecast, views, queue, config, model. Begin with `feed.Feed`, which computes the view of all viewers once per
change; `server.serve` serves it, and `page/app.js` draws it.
"""
