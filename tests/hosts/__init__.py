"""Jobs on several hosts: Linux namespaces with addresses of their own, and links that are counted, slowed and cut."""
